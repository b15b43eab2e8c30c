"""HTTP/1.1 to an engine behind a unix socket: one request a time, answers streamed.

Nothing here trusts the engine: what it says without being read, and without saying anything, is
bounded.
"""

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from typing import cast

import httptools

from potluck.core import parameters

_HEAD_BYTES_MAX = 64 * 1024
"""Of heads, lengths of chunks and trailers, before the next byte of a body."""
_UNREAD_BYTES_MAX = parameters.engine_line_bytes_max + _HEAD_BYTES_MAX
"""Beyond this the engine is not read: the longest line fits, and little more."""


class BrokenAnswerError(Exception):
    """The engine closed the connection early, or what it said is no HTTP."""


class Connection(asyncio.Protocol):
    """Reused between requests, for as long as each answer was read to its end.

    A protocol of its own: a stream reader costs a task switch and two copies for each token.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parts: list[bytes] = []
        # What the parser calls for each part of a body, without a step through Python.
        self.on_body = self._parts.append
        self._parser = httptools.HttpResponseParser(self)
        self._unread_bytes = 0
        self._mute_bytes = 0
        """Since the last byte of a body."""
        self._waiter: asyncio.Future[None] | None = None
        self._ended = ""
        """Why nothing more will come."""
        self._paused = False
        self._asked = False
        self._status = 0
        """Of the answer whose head was read last; 0: of none since the question."""
        self._over = True
        self._close_after = False
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        said = len(self._parts)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._break(f"no answer: {error}")
        if len(self._parts) > said or self._over:
            self._mute_bytes = 0
        else:
            self._mute_bytes += len(data)
            if self._mute_bytes > _HEAD_BYTES_MAX:
                self._break("the answer has too much beside its body")
        self._unread_bytes += len(data)
        if self._unread_bytes >= _UNREAD_BYTES_MAX and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_message_begin(self) -> None:
        if not self._asked:
            self._ended = "the engine spoke unasked"
        self._asked = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self._over = True
        self._close_after = not self._parser.should_keep_alive()

    def eof_received(self) -> None:
        self._end("the answer broke off")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the answer broke off")

    def _break(self, why: str) -> None:
        self._end(why)
        self.close()

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _more(self) -> None:
        """Returns when there is more to read."""
        if self._ended:
            raise BrokenAnswerError(self._ended)
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def post(self, path: str, body: bytes) -> int:
        """Sends, and reads the answer's head: its status."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return await self._ask(head.encode() + body)

    async def get(self, path: str) -> int:
        return await self._ask(f"GET {path} HTTP/1.1\r\nHost: engine\r\n\r\n".encode())

    async def _ask(self, question: bytes) -> int:
        assert self._transport is not None
        self.reusable = self._over = False
        self._asked, self._status = True, 0
        self._transport.write(question)
        while not self._status:
            await self._more()
        return self._status

    async def body(self) -> bytes:
        """The whole answer."""
        whole = b""
        while part := await self.read():
            whole += part
            if len(whole) > parameters.body_bytes_max * 2:
                raise BrokenAnswerError("the answer is too long")
        return whole

    async def read(self) -> bytes:
        """What has come of the answer's body, as soon as there is something; empty: its end."""
        while not self._parts:
            if self._over:
                self.reusable = not self._close_after and not self._ended
                return b""
            await self._more()
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread_bytes = 0
        if self._paused:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()
        return part

    @property
    def stale(self) -> bool:
        """Closed, or it said something that nobody asked for."""
        return bool(self._ended)

    def close(self) -> None:
        """At once: this is how an engine learns that nobody wants the rest."""
        self._ended = self._ended or "the connection was closed"
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.abort()


async def connect(socket: Path) -> Connection:
    """Raises `OSError`.

    The socket is opened first and reached by its descriptor: its path may be too long for the
    kernel (108 bytes), and an engine must not send us elsewhere by a symbolic link.
    """
    descriptor = os.open(socket, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise ConnectionRefusedError(f"{socket} is not a socket")
        _, connection = await asyncio.get_running_loop().create_unix_connection(
            Connection, f"/proc/self/fd/{descriptor}"
        )
    finally:
        os.close(descriptor)
    return connection
