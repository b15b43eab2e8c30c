"""Just enough HTTP/1.1 for an engine behind a unix socket: one request a time, answers streamed.

Nothing here trusts the engine: the lengths it announces are bounded.
"""

import asyncio
import contextlib
import os
import stat
from pathlib import Path
from typing import cast

from potluck.core import parameters

_HEAD_BYTES_MAX = 64 * 1024
_BUFFER_BYTES_MAX = parameters.engine_line_bytes_max + _HEAD_BYTES_MAX
"""Beyond this the engine is not read: the longest chunk fits, and little more."""


class BrokenAnswerError(Exception):
    """The engine closed the connection early, or what it said is no HTTP."""


class Connection(asyncio.Protocol):
    """Reused between requests, for as long as each answer was read to its end.

    A protocol with one buffer: a stream reader costs a task switch and two copies for each token.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._paused = False
        self._left: int | None = None
        """Bytes of a body whose length was announced; None: it comes in chunks."""
        self._over = True
        self._close_after = False
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) >= _BUFFER_BYTES_MAX and not self._paused:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _more(self) -> None:
        """Returns when there is more in the buffer."""
        if self._ended:
            raise BrokenAnswerError("the answer broke off")
        if self._paused:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()
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
        self.reusable = False
        self._transport.write(question)
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _HEAD_BYTES_MAX:
                raise BrokenAnswerError("no answer's head: it is too long")
            await self._more()
        try:
            status_line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
            status = int(status_line.split(" ", 2)[1])
            headers = _headers(lines)
            chunked = "chunked" in headers.get("transfer-encoding", "")
            self._left = None if chunked else int(headers.get("content-length", "0"))
        except (ValueError, IndexError) as error:
            raise BrokenAnswerError(f"no answer's head: {error}") from error
        if self._left is not None and not 0 <= self._left <= parameters.body_bytes_max * 2:
            raise BrokenAnswerError("the answer is too long")
        del self._buffer[: end + 4]
        self._over = self._left == 0
        self._close_after = headers.get("connection", "").lower() == "close"
        return status

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
        while not self._over:
            part = self._whole_chunks() if self._left is None else self._announced()
            if part:
                return part
            if not self._over:
                await self._more()
        self.reusable = not self._close_after
        return b""

    def _announced(self) -> bytes:
        assert self._left is not None
        part = bytes(self._buffer[: self._left])
        del self._buffer[: self._left]
        self._left -= len(part)
        self._over = self._left == 0
        return part

    def _whole_chunks(self) -> bytes:
        """All that are complete (RFC 9112, 7.1)."""
        buffer, at = self._buffer, 0
        parts = []
        while (line_end := buffer.find(b"\r\n", at)) >= 0:
            size = _chunk_size(bytes(buffer[at:line_end]))
            begin, end = line_end + 2, line_end + 2 + size
            if size == 0:
                if (trailer_end := buffer.find(b"\r\n", begin)) >= 0:
                    self._over = True
                    at = trailer_end + 2
                break
            if len(buffer) < end + 2:
                break
            parts.append(bytes(buffer[begin:end]))
            at = end + 2
        else:
            if len(buffer) - at > _HEAD_BYTES_MAX:
                raise BrokenAnswerError("the answer broke off: no chunk's length")
        if len(buffer) >= _BUFFER_BYTES_MAX and at == 0:
            raise BrokenAnswerError("the answer is too long")
        del buffer[:at]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def stale(self) -> bool:
        """Closed, or it said something that nobody asked for."""
        return self._ended or bool(self._buffer)

    def close(self) -> None:
        """At once: this is how an engine learns that nobody wants the rest."""
        self._ended = True
        if self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.abort()


def _chunk_size(line: bytes) -> int:
    try:
        size = int(line.partition(b";")[0], 16)
    except ValueError as error:
        raise BrokenAnswerError(f"the answer broke off: {error}") from error
    if not 0 <= size <= parameters.engine_line_bytes_max:
        raise BrokenAnswerError("a chunk of the answer is too long")
    return size


def _headers(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


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
