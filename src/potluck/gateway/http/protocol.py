"""uvicorn's HTTP protocol, with the token path answered on the connection itself.

`POST /v1/chat/completions` becomes an `Exchange`; everything else is ASGI as usual
(bench/gateway.py measures the difference). Shutdown stays uvicorn's.

Rule: whoever sends without end, or without reading, costs a bounded memory for a bounded time:
nothing is read while nothing can be written, and `look` lets go of who stands still.
"""

import asyncio
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.gateway.http import errors
from potluck.gateway.http.errors import Problem
from potluck.gateway.http.exchange import Exchange
from potluck.gateway.serving.serving import Serving

TOKEN_PATH: Final = b"/v1/chat/completions"
_WRITE_HIGH_BYTES: Final = 64 * 1024


class TokenPathProtocol(HttpToolsProtocol):
    serving: Serving

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._current: Exchange | RequestResponseCycle | None = None
        """What is being answered; others wait in the pipeline."""
        self._head_of: object = None
        self._head = b""
        self._in_head = False
        self._head_bytes = 0
        self._read_bytes = 0
        self._arriving = False
        """A request has begun, and is not here as a whole."""
        self._since_ms = 0
        """When `look` first saw it arriving, or the connection idle."""
        self._ended = False
        """Refused as a whole; what still comes is dropped."""
        self._advancing = False
        self._unsent_bytes = 0
        self._moved_ms = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        if len(self.connections) > parameters.connections_max:
            self._end_with(Problem(Refusal.OVERLOADED, "Too many connections are open."))
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        current, self._current = self._current, None
        if isinstance(current, Exchange):
            current.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._read_bytes = len(data)
        self._head_bytes += self._read_bytes
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # Nothing here upgrades; the request was answered as it stands.
        except httptools.HttpParserError as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                self.logger.exception("a request could not be taken")
            self._end_with(Problem(Refusal.INVALID_REQUEST, "This is not HTTP/1.1."))
            return
        if self._in_head and self._head_bytes > parameters.request_head_bytes_max:
            self._end_with(Problem(Refusal.HEAD_TOO_LARGE))
        elif self._arriving:
            self._await_rest()

    def _await_rest(self) -> None:
        if not self._in_head and isinstance(self._current, Exchange):
            self._current.await_rest()

    def on_message_begin(self) -> None:
        """uvicorn's scope is built only for what becomes ASGI."""
        self._in_head = self._arriving = True
        self._head_bytes = self._since_ms = 0
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # A trailer: nobody reads it.
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def _head_problem(self) -> Problem | None:
        """Counted only where much was read at once."""
        if self._head_bytes + self._read_bytes <= parameters.request_head_bytes_max:
            return None
        size_bytes = len(self.url) + sum([len(name) + len(value) for name, value in self.headers])
        over = size_bytes > parameters.request_head_bytes_max
        return Problem(Refusal.HEAD_TOO_LARGE) if over else None

    def _begin_asgi(self) -> None:
        url, expects, headers = self.url, self.expect_100_continue, self.headers
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers

    def on_headers_complete(self) -> None:
        self._in_head = False
        problem = self._head_problem()
        if problem is None and (
            self.parser.get_method() != b"POST"
            or self.url.partition(b"?")[0] != TOKEN_PATH
            or self.parser.should_upgrade()
        ):
            self._begin_asgi()
            super().on_headers_complete()
            return
        version = self.parser.get_http_version()
        existing = self.cycle
        exchange = Exchange(
            self,
            self.serving,
            self.headers,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            chunked=version != "1.0",
            expects=self.expect_100_continue,
            problem=problem,
        )
        self.cycle = exchange  # type: ignore[assignment]
        if (existing is None or existing.response_complete) and not self.flow.write_paused:
            self._start_asgi_task(exchange, self.app)  # type: ignore[arg-type]
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.transport.is_closing():
            return  # Sent behind a request that ended the connection.
        self._current = cycle
        if isinstance(cycle, Exchange):
            cycle.begin()
        else:
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        cycle: object = self.cycle
        if isinstance(cycle, Exchange):
            cycle.feed(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving = False
        self._since_ms = 0
        cycle: object = self.cycle
        if isinstance(cycle, Exchange):
            cycle.finished()
        else:
            super().on_message_complete()

    # Who reads, and who does not

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_or_not()

    def resume_writing(self) -> None:
        super().resume_writing()
        if isinstance(self._current, Exchange):
            self._current.wake()
        self._advance()

    def _read_or_not(self) -> None:
        """A stream's client is heard even if it does not read: it may leave."""
        if self.flow.write_paused and not isinstance(self._current, Exchange):
            self.flow.pause_reading()
        elif not self.pipeline:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Idle connections are ended by `look`, not by a timer for each answer."""
        self._current = None
        self._since_ms = 0
        self._advance()

    def _advance(self) -> None:
        """The next of the requests that wait, and then more of them. Not by recursion: thousands
        may be refused in a row."""
        if self._advancing or self.transport.is_closing():
            return
        self._advancing = True
        try:
            while self.pipeline and self._current is None and not self.flow.write_paused:
                self._start_asgi_task(*self.pipeline.pop())
        finally:
            self._advancing = False
        self._read_or_not()
        if self._arriving and not self.pipeline:
            self._await_rest()

    def look(self, now_ms: int) -> None:
        """Each second: who neither sends nor reads is let go."""
        if self._stuck(now_ms):
            self.transport.abort()
            return
        answering = self._current is not None and (self._in_head or not self._arriving)
        if self._ended or self.transport.is_closing() or answering or self.flow.read_paused:
            self._since_ms = 0
        elif not self._since_ms:
            self._since_ms = now_ms
        elif self._arriving:
            if now_ms - self._since_ms >= parameters.request_arrival_ms:
                self._late()
        elif now_ms - self._since_ms >= self._idle_ms_max:
            self.transport.close()

    @property
    def _idle_ms_max(self) -> int:
        return parameters.request_arrival_ms if self.cycle is None else parameters.keep_alive_ms

    def _stuck(self, now_ms: int) -> bool:
        """Something is unsent, and has not become less for too long, whatever the state."""
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes == 0 or unsent_bytes < self._unsent_bytes or not self._moved_ms:
            self._moved_ms = now_ms
        self._unsent_bytes = unsent_bytes
        return now_ms - self._moved_ms >= parameters.slow_client_timeout_ms

    def _late(self) -> None:
        cycle: object = self.cycle
        if not self._in_head and isinstance(cycle, Exchange):
            cycle.late()
        else:
            self._end_with(Problem(Refusal.CLIENT_TOO_SLOW))

    def _end_with(self, problem: Problem) -> None:
        """The last word on this connection, where there is a place for it."""
        self._ended = True
        if self._busy_with_answer():
            self.transport.abort()
            return
        body = errors.document(problem)
        lines = b"".join([b"%b: %b\r\n" % line for line in errors.headers(problem)])
        self.transport.write(
            b"%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (STATUS_LINE[errors.status(problem)], lines, len(body), body)
        )
        self.linger()

    def _busy_with_answer(self) -> bool:
        current = self._current
        if current is None:
            return self._arriving and not self._in_head  # Answered before it was here.
        if isinstance(current, Exchange) or self.pipeline or current.response_started:
            return True
        current.disconnected = True  # What it would still answer is not written.
        return False

    def exchange_complete(self, exchange: Exchange) -> None:
        if self._current is exchange:
            self._current = None
        if not exchange.disconnected:
            self.on_response_complete()

    def linger(self) -> None:
        """Reads and drops what still comes for a moment, so that the answer arrives."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(parameters.linger_ms / 1000, self._abort)

    def _abort(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()

    def default_head(self) -> bytes:
        """`date` and the like, which uvicorn renews each second."""
        headers = self.server_state.default_headers
        if headers is not self._head_of:
            self._head_of = headers
            self._head = b"".join([b"%b: %b\r\n" % line for line in headers])
        return self._head
