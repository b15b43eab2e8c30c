"""uvicorn's HTTP protocol, with the token path answered on the connection itself.

`POST /v1/chat/completions` becomes an `Exchange`; everything else is ASGI as usual
(bench/gateway.py measures the difference). Pipelining, keep-alive and shutdown stay uvicorn's.
"""

import asyncio
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from potluck.core.refusals import Refusal
from potluck.gateway.http import errors
from potluck.gateway.http.errors import Problem
from potluck.gateway.http.exchange import Exchange
from potluck.gateway.serving.serving import Serving

TOKEN_PATH: Final = b"/v1/chat/completions"
LINGER_S: Final = 2.0
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
        self._active: Exchange | None = None
        self._head_of: object = None
        self._head = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        active, self._active = self._active, None
        if active is not None:
            active.lost()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """uvicorn's scope is built only for what becomes ASGI."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def _begin_asgi(self) -> None:
        url, expects, headers = self.url, self.expect_100_continue, self.headers
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers

    def on_headers_complete(self) -> None:
        if (
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
        )
        self.cycle = exchange  # type: ignore[assignment]
        if existing is None or existing.response_complete:
            self._start_asgi_task(exchange, self.app)  # type: ignore[arg-type]
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))  # type: ignore[arg-type]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if isinstance(cycle, Exchange):
            self._active = cycle
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
        cycle: object = self.cycle
        if isinstance(cycle, Exchange):
            cycle.finished()
        else:
            super().on_message_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._active is not None:
            self._active.wake()

    def exchange_complete(self, exchange: Exchange) -> None:
        if self._active is exchange:
            self._active = None
        if not exchange.disconnected:
            self.on_response_complete()

    def linger(self) -> None:
        """Reads and drops what still comes for a moment, so that the answer arrives."""
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self._abort)

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

    def send_400_response(self, msg: str) -> None:
        body = errors.document(Problem(Refusal.INVALID_REQUEST, msg))
        self.transport.write(
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body)
        )
        self.transport.close()
