"""One `POST /v1/chat/completions`, written directly on its connection.

Rule: output is drained, and so acknowledged, only while the socket takes it; whoever does not read
makes the node wait, and never fills our memory.
"""

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from potluck.core import parameters
from potluck.core.ids import receipt_id
from potluck.core.refusals import Refusal
from potluck.gateway.http import access, chat, errors, sse
from potluck.gateway.http.chat import Parsed
from potluck.gateway.http.errors import Headers, Problem
from potluck.gateway.http.sse import Frames
from potluck.gateway.serving.requests import Completion, Piece
from potluck.gateway.serving.serving import Serving
from potluck.messages.queries import KeyRecord

if TYPE_CHECKING:
    from potluck.gateway.http.protocol import TokenPathProtocol


class _Nobody:
    def set(self) -> None:
        """uvicorn wakes its own cycles so; an exchange is called instead."""


class Exchange:
    """Stands where uvicorn's request-response cycle stands; `begin` is called when its turn is."""

    message_event: Final = _Nobody()

    __slots__ = (
        "_awaiting", "_body", "_body_bytes", "_completion", "_digest", "_discarding", "_expects",
        "_finding", "_frames", "_headers_sent", "_parsed", "_problem", "_protocol", "_request_id",
        "_serving", "_started", "_started_ms", "_task", "_whole", "chunked", "disconnected",
        "keep_alive", "response_complete",
    )  # fmt: skip

    def __init__(
        self,
        protocol: "TokenPathProtocol",
        serving: Serving,
        headers: Headers,
        *,
        keep_alive: bool,
        chunked: bool,
        expects: bool,
        problem: Problem | None = None,
    ) -> None:
        """`problem`: what is wrong with it already."""
        self.response_complete = False
        self.disconnected = False
        self.keep_alive = keep_alive
        self.chunked = chunked
        """Whether the peer knows chunked transfer (HTTP/1.1)."""
        self._protocol = protocol
        self._serving = serving
        self._expects = expects
        self._problem = problem
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._whole = False
        self._awaiting = False
        self._finding = False
        self._started = False
        self._discarding = False
        self._headers_sent = False
        self._completion: Completion | None = None
        self._parsed: Parsed | None = None
        self._frames: Frames | None = None
        self._task: asyncio.Task[None] | None = None
        self._request_id = ""
        self._digest = ""
        self._started_ms = 0
        announced_bytes = 0
        for name, value in headers:
            if name == b"authorization":
                self._digest = access.digest_in(value)
            elif name == b"content-length":
                announced_bytes = int(value)
        if announced_bytes > parameters.body_bytes_max:
            self._problem = Problem(Refusal.BODY_TOO_LARGE)
        elif not self._digest and problem is None:
            self._problem = Problem(Refusal.INVALID_KEY)

    # The request comes in

    def begin(self) -> None:
        self._started = True
        self._started_ms = self._serving.clock.now_ms()
        if self._whole:
            self._admit()

    def await_rest(self) -> None:
        """What was read did not hold all of it. Who may not ask need not send the rest."""
        if self._awaiting or self.response_complete:
            return
        self._awaiting = True
        if self._problem is not None:
            self._refuse(self._problem)
            return
        known = self._serving.key_cached(self._digest)
        if known is None:
            self._find_key_soon()
        elif isinstance(known, Refusal):
            self._refuse(Problem(known))
        elif self._expects:
            self._continue()

    def _continue(self) -> None:
        self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def feed(self, data: bytes) -> None:
        if self._problem is not None or self.response_complete:
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > parameters.body_bytes_max:
            self._problem = Problem(Refusal.BODY_TOO_LARGE)
            self._body = []
            if self._started:
                self._refuse(self._problem)

    def finished(self) -> None:
        self._whole = True
        if self._discarding:
            self._protocol.transport.close()
        elif self._started and not self.response_complete and not self._finding:
            self._admit()

    def late(self) -> None:
        """The rest of the request has not come in its time."""
        self._refuse(Problem(Refusal.CLIENT_TOO_SLOW))

    def lost(self) -> None:
        """The client left: the engine stops, and what was shown is paid."""
        self.disconnected = True
        if self._task is not None:
            self._task.cancel()
        if self._completion is not None:
            self._completion.cancel()

    # Admission

    def _admit(self) -> None:
        if self._problem is not None:
            self._refuse(self._problem)
            return
        known = self._serving.key_cached(self._digest)
        if known is None:
            self._find_key_soon()
        else:
            self._admit_key(known)

    def _find_key_soon(self) -> None:
        self._finding = True
        self._later(self._find_key())

    async def _find_key(self) -> None:
        key = await self._serving.keys.find(self._digest)
        self._finding = False
        if self._whole or isinstance(key, Refusal):
            self._admit_key(key)
        elif self._expects and not self.response_complete:
            self._continue()

    def _admit_key(self, key: KeyRecord | Refusal) -> None:
        if self.response_complete or self.disconnected:
            return
        if isinstance(key, Refusal):
            self._refuse(Problem(key))
            return
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        parsed = chat.parse(body)
        if isinstance(parsed, Problem):
            self._refuse(parsed)
            return
        self._parsed = parsed
        result = self._serving.submit_now(parsed.ask, key, self)
        if isinstance(result, int):
            self._later(self._submit(parsed, key))
        else:
            self._submitted(result)

    async def _submit(self, parsed: Parsed, key: KeyRecord) -> None:
        self._submitted(await self._serving.submit(parsed.ask, key, self))

    def _submitted(self, result: Completion | Refusal) -> None:
        if isinstance(result, Refusal):
            param = "model" if result is Refusal.MODEL_NOT_FOUND else None
            self._refuse(Problem(result, param=param))
            return
        self._completion = result
        self._request_id = result.lives[0].request

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = asyncio.get_running_loop().create_task(self._guarded(work))

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception:
            self._protocol.logger.exception("a request failed")
            if not self.disconnected and not self._headers_sent:
                self._refuse(Problem(Refusal.INTERNAL))

    # The answer goes out

    def wake(self) -> None:
        """New output, or room in the socket."""
        completion = self._completion
        if completion is None or self.response_complete or self.disconnected:
            return
        failure = completion.failure
        if failure is not None:
            self._failed(Problem(failure.refusal, failure.message))
        elif not self._protocol.flow.write_paused:
            pieces = completion.drain()
            if completion.ask.stream:
                self._stream(completion, pieces)
            elif completion.ended:
                self._answer_whole(completion, pieces)

    def broken(self) -> None:
        if self._headers_sent:
            self._protocol.transport.abort()
        else:
            self._refuse(Problem(Refusal.INTERNAL))

    def quiet(self) -> None:
        if self._headers_sent and self._completion is not None and self._completion.ask.stream:
            self._write_body(sse.COMMENT, last=False)

    def _stream(self, completion: Completion, pieces: list[Piece]) -> None:
        if not pieces and not completion.ended:
            return
        if self._frames is None:
            self._frames = self._new_frames(completion)
        frames = self._frames
        if len(pieces) == 1:
            body = frames.piece(pieces[0])
        else:
            body = b"".join([frames.piece(piece) for piece in pieces])
        if completion.ended:
            body = b"%b%b%b" % (body, frames.usage(completion.usage), sse.DONE)
        self._write_body(body, last=completion.ended)

    def _new_frames(self, completion: Completion) -> Frames:
        assert self._parsed is not None
        return Frames(
            answer=self._answer_id,
            created_s=self._serving.clock.wall_ms() // 1000,
            model=completion.ask.model,
            fingerprint=_fingerprint(completion),
            include_usage=self._parsed.include_usage,
        )

    def _answer_whole(self, completion: Completion, pieces: list[Piece]) -> None:
        usage = completion.usage
        body = sse.whole(
            answer=self._answer_id,
            created_s=self._serving.clock.wall_ms() // 1000,
            model=completion.ask.model,
            fingerprint=_fingerprint(completion),
            pieces=pieces,
            usage=usage,
        )
        head = b"%bcontent-type: application/json\r\nx-potluck-cost-micro: %d\r\n" % (
            self._common_head(completion),
            usage.cost_micro,
        )
        self._write_whole(head, body)

    @property
    def _answer_id(self) -> str:
        return "chatcmpl-" + self._request_id.removeprefix("req_")

    def _common_head(self, completion: Completion) -> bytes:
        lives = completion.lives
        parsed = self._parsed
        receipts: str = receipt_id(lives[0].request, lives[0].attempt)
        for life in lives[1:]:
            receipts += ", " + receipt_id(life.request, life.attempt)
        head = (
            "HTTP/1.1 200 OK\r\n"
            f"x-request-id: {self._request_id}\r\nx-potluck-receipt: {receipts}\r\n"
            f"x-potluck-node: {lives[0].replica.node}\r\n"
            f"openai-processing-ms: {self._serving.clock.now_ms() - self._started_ms}\r\n"
        ).encode()
        if parsed is not None and parsed.ignored:
            names = chat.ignored_header(parsed.ignored)
            head += b"x-potluck-ignored-fields: %b\r\n" % names
        return head

    def _write_body(self, body: bytes, *, last: bool) -> None:
        """A part of a stream, after the head if that has not left yet."""
        if self.chunked:
            body = b"%x\r\n%b\r\n%b" % (len(body), body, b"0\r\n\r\n" if last else b"")
        if not self._headers_sent:
            assert self._completion is not None
            self._headers_sent = True
            if not self.chunked:
                self.keep_alive = False
            body = b"".join(
                [
                    self._common_head(self._completion),
                    b"content-type: text/event-stream; charset=utf-8\r\n"
                    b"cache-control: no-cache\r\n",
                    b"transfer-encoding: chunked\r\n" if self.chunked else b"",
                    self._end_of_head(),
                    body,
                ]
            )
        self._protocol.transport.write(body)
        if last:
            self._complete()

    def _write_whole(self, head: bytes, body: bytes) -> None:
        self._headers_sent = True
        self._protocol.transport.write(
            b"%bcontent-length: %d\r\n%b%b" % (head, len(body), self._end_of_head(), body)
        )
        self._complete()

    def _end_of_head(self) -> bytes:
        close = b"" if self.keep_alive else b"connection: close\r\n"
        return b"%b%b\r\n" % (self._protocol.default_head(), close)

    def _failed(self, problem: Problem) -> None:
        if not self._headers_sent:
            self._refuse(problem)
        elif problem.refusal is Refusal.CLIENT_TOO_SLOW:
            # It does not read: an error frame would only wait behind what it left unread.
            self.response_complete = True
            self._protocol.transport.abort()
        else:
            self._write_body(sse.error_frame(problem), last=True)

    def _refuse(self, problem: Problem) -> None:
        if self.response_complete or self.disconnected:
            return
        if not self._request_id:
            self._request_id = "req_" + self._serving.ids.ulid()
        body = errors.document(problem)
        if not self._whole:
            self.keep_alive = False
        lines = [b"%b: %b\r\n" % line for line in errors.headers(problem)]
        head = b"%b%bx-request-id: %b\r\n" % (
            STATUS_LINE[errors.status(problem)],
            b"".join(lines),
            self._request_id.encode(),
        )
        self._discarding = not self._whole
        self._write_whole(head, body)

    def _complete(self) -> None:
        self.response_complete = True
        if self._discarding:
            # Closing with unread bytes would reset the connection, and the answer with it.
            self._protocol.linger()
        elif not self.keep_alive:
            self._protocol.transport.close()
        self._protocol.exchange_complete(self)


def _fingerprint(completion: Completion) -> str:
    return "fp_" + completion.lives[0].replica.digest[:12]
