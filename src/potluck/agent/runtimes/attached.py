"""Speaks with llama.cpp's server over a unix socket: the engine's side of `ports.runtime`.

Rule: completions are always asked for as a stream, because only closing a stream stops the engine.
`Attached` uses a server that its owner started; Potluck neither confines nor stops it.
"""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from potluck.agent.runtimes import http
from potluck.core import parameters
from potluck.core.ids import Digest
from potluck.core.refusals import Refusal
from potluck.ports.runtime import Ask, EngineError, Finish, ModelSpec, Piece, Prefilled

UNKNOWN_TOKEN: Final = -1
"""Stands for a token that the engine counted and did not name. It holds back the tokens of a
character until the last of them, which alone it names."""


class _Candidate(msgspec.Struct):
    token: str
    bytes: list[int]
    logprob: float


class _Probability(msgspec.Struct):
    token: str
    bytes: list[int]
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Timings(msgspec.Struct):
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0


class _Error(msgspec.Struct):
    message: str = ""
    type: str = ""


class _Event(msgspec.Struct):
    """One line of `/completion` with `stream`, `return_tokens`; unknown fields are ignored."""

    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    timings: _Timings | None = None
    completion_probabilities: list[_Probability] = []
    error: _Error | None = None


class _Message(msgspec.Struct):
    role: str
    content: str


class _Template(msgspec.Struct):
    prompt: str


class _ErrorBody(msgspec.Struct):
    error: _Error


_event_decoder = msgspec.json.Decoder(_Event)
_messages_decoder = msgspec.json.Decoder(list[_Message])
_template_decoder = msgspec.json.Decoder(_Template)
_error_decoder = msgspec.json.Decoder(_ErrorBody)
_encoder = msgspec.json.Encoder()


class LlamaClient:
    """Requests to one server. At most `kept` idle connections: each occupies a thread there."""

    def __init__(self, socket: Path, kept: int) -> None:
        self._socket = socket
        self._kept = min(kept, parameters.engine_connections_kept)
        self._idle: list[http.Connection] = []

    async def healthy(self) -> bool:
        try:
            connection = await http.connect(self._socket)
        except OSError:
            return False
        try:
            return await connection.get("/health") == 200
        except http.BrokenAnswerError:
            return False
        finally:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def generate(self, ask: Ask) -> AsyncIterator[Piece | Prefilled | Finish]:
        prompt = await self._prompt(ask.messages)
        connection = await self._ask("/completion", _completion(ask, prompt))
        try:
            counted, rest = 0, b""
            while part := await connection.read():
                events, rest = _events(rest + part if rest else part)
                if events and counted == 0 and events[0].error is None:
                    yield Prefilled(events[0].tokens_evaluated)
                piece = _piece(events, counted, ask.top_logprobs)
                if piece is not None:
                    counted += len(piece.token_ids)
                    yield piece
                for event in events:
                    if event.error is not None:
                        raise _refused(event.error)
                    if event.stop:
                        yield _finish(event)
        except http.BrokenAnswerError as error:
            raise EngineError(Refusal.ENGINE_FAILED, str(error)) from error
        finally:
            self._give_back(connection)

    async def _prompt(self, messages: bytes) -> str:
        try:
            # Decoded first: a peer's bytes must not add fields of their own to the question.
            body = _encoder.encode({"messages": _messages_decoder.decode(messages)})
        except msgspec.DecodeError as error:
            raise EngineError(Refusal.INVALID_REQUEST, f"messages: {error}") from error
        connection = await self._ask("/apply-template", body)
        try:
            return _template_decoder.decode(await connection.body()).prompt
        except (http.BrokenAnswerError, msgspec.DecodeError) as error:
            raise EngineError(Refusal.ENGINE_FAILED, f"no prompt: {error}") from error
        finally:
            self._give_back(connection)

    async def _ask(self, path: str, body: bytes) -> http.Connection:
        """A connection whose answer's head was read and good. Raises `EngineError`."""
        while True:
            connection, reused = await self._connection()
            try:
                status = await connection.post(path, body)
            except BaseException as error:
                connection.close()
                if not isinstance(error, http.BrokenAnswerError):
                    raise
                if reused:
                    # The server closes idle connections; nothing was begun on this one.
                    continue
                raise EngineError(Refusal.ENGINE_FAILED, str(error)) from error
            if status == 200:
                return connection
            raise await self._bad_answer(connection, status)

    async def _bad_answer(self, connection: http.Connection, status: int) -> EngineError:
        try:
            return _refused(_error_decoder.decode(await connection.body()).error)
        except (http.BrokenAnswerError, msgspec.DecodeError):
            return EngineError(Refusal.ENGINE_FAILED, f"the engine answered {status}")
        finally:
            self._give_back(connection)

    async def _connection(self) -> tuple[http.Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.stale:
                return connection, True
            connection.close()
        try:
            return await http.connect(self._socket), False
        except OSError as error:
            raise EngineError(Refusal.ENGINE_FAILED, f"the engine is gone: {error}") from error

    def _give_back(self, connection: http.Connection) -> None:
        if connection.reusable and len(self._idle) < self._kept:
            self._idle.append(connection)
        else:
            connection.close()


def _completion(ask: Ask, prompt: str) -> bytes:
    body: dict[str, Any] = {
        "prompt": prompt,
        "n_predict": ask.max_tokens,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": True,
        "stop": ask.stop,
    }
    if ask.temperature is not None:
        body["temperature"] = ask.temperature
    if ask.top_p is not None:
        body["top_p"] = ask.top_p
    if ask.seed is not None:
        # The engine takes 32 bits, and the highest number means "by chance".
        body["seed"] = ask.seed % 0xFFFFFFFF
    if ask.top_logprobs is not None:
        body["n_probs"] = max(1, ask.top_logprobs)
    return _encoder.encode(body)


def _events(said: bytes) -> tuple[list[_Event], bytes]:
    """Those of the whole lines, and what follows the last of these."""
    lines = said.split(b"\n")
    rest = lines.pop()
    if len(rest) > parameters.engine_line_bytes_max:
        raise http.BrokenAnswerError("a line of the answer is too long")
    try:
        events = [
            _event_decoder.decode(line[line.index(b"{") :])
            for line in lines
            if line.startswith((b"data: {", b"error: {"))
        ]
    except msgspec.DecodeError as error:
        raise http.BrokenAnswerError(f"no event: {error}") from error
    return events, rest


def _piece(events: Sequence[_Event], counted: int, top_logprobs: int | None) -> Piece | None:
    """What is new in all that was read at once; tokens that were counted and not named come before
    the next that is named."""
    ids: list[int] = []
    texts: list[str] = []
    logprobs: list[bytes] = []
    for event in events:
        unnamed = event.tokens_predicted - counted - len(ids) - len(event.tokens)
        if unnamed < 0:
            continue
        if unnamed:
            ids += (UNKNOWN_TOKEN,) * unnamed
        ids += event.tokens
        texts.append(event.content)
        if top_logprobs is not None and event.completion_probabilities:
            logprobs.append(_logprobs(event.completion_probabilities, top_logprobs))
    text = "".join(texts)
    if not ids and not text:
        return None
    return Piece(tuple(ids), text.encode(), b",".join(logprobs) if logprobs else b"")


def _logprobs(entries: Sequence[_Probability], top: int) -> bytes:
    """OpenAI's entries, comma-separated: `{token, logprob, bytes, top_logprobs}`."""
    shown = [
        {
            "token": entry.token,
            "logprob": entry.logprob,
            "bytes": entry.bytes,
            "top_logprobs": [
                {"token": one.token, "logprob": one.logprob, "bytes": one.bytes}
                for one in entry.top_logprobs[:top]
            ],
        }
        for entry in entries
    ]
    return _encoder.encode(shown)[1:-1]


def _finish(event: _Event) -> Finish:
    timings = event.timings or _Timings()
    return Finish(
        reason="length" if event.stop_type == "limit" else "stop",
        prompt_tokens=event.tokens_evaluated,
        completion_tokens=event.tokens_predicted,
        prefill_ms=round(timings.prompt_ms),
        decode_ms=round(timings.predicted_ms),
    )


def _refused(error: _Error) -> EngineError:
    if error.type == "exceed_context_size_error":
        return EngineError(Refusal.CONTEXT_LENGTH_EXCEEDED, error.message)
    if error.type == "invalid_request_error":
        return EngineError(Refusal.INVALID_REQUEST, error.message)
    return EngineError(Refusal.ENGINE_FAILED, error.message)


class AttachedEngine:
    """`ports.runtime.Engine` on a socket that somebody else listens on."""

    tier = "none"

    def __init__(self, socket: Path, slots: int, digest: Digest) -> None:
        self.digest = digest
        self._client = LlamaClient(socket, slots)
        self._socket = socket

    @property
    def alive(self) -> bool:
        return self._socket.is_socket()

    def generate(self, ask: Ask) -> AsyncIterator[Piece | Prefilled | Finish]:
        return self._client.generate(ask)

    async def stop(self) -> None:
        self._client.close()


class Attached:
    """`ports.runtime.Runtime`: every model is served by the one server behind `socket`."""

    def __init__(self, socket: Path, engine_digest: Digest) -> None:
        self._socket = socket
        self._digest = engine_digest

    async def start(self, spec: ModelSpec) -> AttachedEngine:
        engine = AttachedEngine(self._socket, spec.slots, self._digest)
        if not await LlamaClient(self._socket, 0).healthy():
            raise EngineError(Refusal.ENGINE_FAILED, f"no engine answers at {self._socket}")
        return engine
