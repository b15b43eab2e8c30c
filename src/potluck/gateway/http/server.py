"""uvicorn around the gateway: given sockets, the token path's protocol, a graceful stop.

The native API's framework is loaded in a thread after the sockets listen, so that neither start-up
nor running streams wait for it.
"""

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import Iterator, Sequence, Set
from typing import Any

import uvicorn

from potluck.core import parameters
from potluck.gateway.http import app
from potluck.gateway.http.asgi import App
from potluck.gateway.http.protocol import TokenPathProtocol
from potluck.gateway.serving.serving import Serving

_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The composition root hears signals."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket; port 0 picks a free one. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(2048)
        found.setblocking(False)
    except OSError:
        found.close()
        raise
    return found


async def serve(
    serving: Serving,
    sockets: Sequence[socket.socket],
    stop: asyncio.Event,
    *,
    grace_ms: int = parameters.stop_grace_ms,
) -> None:
    """Answers until `stop` is set; then refuses, lets streams end for `grace_ms`, and returns.

    `serving.start()` has been called by the composition root; `serving.stop()` is called here.
    """
    # A request makes no cycles that matter; the default thresholds cost a twentieth of all CPU.
    gc.set_threshold(50_000, 20, 100)
    native = _Native(serving)
    server = _Server(_config(serving, app.create(serving, native.get)))
    running = asyncio.create_task(server.serve(sockets=list(sockets)))
    native.begin()
    looking = asyncio.create_task(_look_for_ever(serving, server.server_state.connections))
    waiting = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        await serving.stop(grace_ms)
        server.should_exit = True
        try:
            await running
        finally:
            looking.cancel()


async def _look_for_ever(serving: Serving, connections: Set[Any]) -> None:
    """One look at each connection instead of timers for each."""
    while True:
        await asyncio.sleep(parameters.connection_look_ms / 1000)
        now_ms = serving.clock.now_ms()
        for connection in list(connections):
            try:
                connection.look(now_ms)
            except Exception:
                _log.exception("a connection could not be looked at")


def _config(serving: Serving, application: App) -> uvicorn.Config:
    bound: Any = type("BoundProtocol", (TokenPathProtocol,), {"serving": serving})
    return uvicorn.Config(
        application,
        http=bound,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=parameters.connections_close_ms // 1000,
    )


class _Native:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._loading: asyncio.Task[App] | None = None

    def begin(self) -> None:
        if self._loading is None:
            self._loading = asyncio.create_task(self._load())

    async def get(self) -> App:
        self.begin()
        assert self._loading is not None
        return await asyncio.shield(self._loading)

    async def _load(self) -> App:
        return await asyncio.to_thread(_create_native, self._serving)


def _create_native(serving: Serving) -> App:
    from potluck.gateway.http import native

    return native.create(serving)
