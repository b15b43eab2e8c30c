"""Just enough HTTP/1.1 for an engine behind a unix socket: one request a time, answers streamed.

Nothing here trusts the engine: the lengths it announces are bounded.
"""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

from potluck.core import parameters

_HEAD_BYTES_MAX = 64 * 1024


class BrokenAnswerError(Exception):
    """The engine closed the connection early, or what it said is no HTTP."""


class Connection:
    """Reused between requests, for as long as each answer was read to its end."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._left: int | None = None
        self._close_after = False
        self.reusable = False

    async def post(self, path: str, body: bytes) -> int:
        """Sends, and reads the answer's head: its status."""
        self.reusable = False
        head = (
            f"POST {path} HTTP/1.1\r\nHost: engine\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        return await self._head()

    async def get(self, path: str) -> int:
        self.reusable = False
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: engine\r\n\r\n".encode())
        return await self._head()

    async def _head(self) -> int:
        try:
            raw = await self._reader.readuntil(b"\r\n\r\n")
            status_line, *lines = raw.decode("latin-1").split("\r\n")
            status = int(status_line.split(" ", 2)[1])
            headers = _headers(lines)
            chunked = "chunked" in headers.get("transfer-encoding", "")
            self._left = None if chunked else int(headers.get("content-length", "0"))
            self._close_after = headers.get("connection", "").lower() == "close"
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError,
                ValueError, IndexError) as error:  # fmt: skip
            raise BrokenAnswerError(f"no answer's head: {error}") from error
        return status

    async def body(self) -> bytes:
        """The whole answer."""
        parts = []
        size = 0
        async for part in self.parts():
            size += len(part)
            if size > parameters.body_bytes_max * 2:
                raise BrokenAnswerError("the answer is too long")
            parts.append(part)
        return b"".join(parts)

    async def parts(self) -> AsyncIterator[bytes]:
        """The answer's pieces as they come (RFC 9112, 7.1)."""
        try:
            if self._left is not None:
                if self._left > parameters.body_bytes_max * 2:
                    raise BrokenAnswerError("the answer is too long")
                yield await self._reader.readexactly(self._left)
            else:
                while size := int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16):
                    if size > parameters.engine_line_bytes_max:
                        raise BrokenAnswerError("a chunk of the answer is too long")
                    yield (await self._reader.readexactly(size + 2))[:-2]
                await self._reader.readuntil(b"\r\n")
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError,
                ValueError) as error:  # fmt: skip
            raise BrokenAnswerError(f"the answer broke off: {error}") from error
        self.reusable = not self._close_after

    @property
    def stale(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        """At once: this is how an engine learns that nobody wants the rest."""
        with contextlib.suppress(RuntimeError):
            self._writer.transport.abort()


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
        reader, writer = await asyncio.open_unix_connection(
            f"/proc/self/fd/{descriptor}", limit=_HEAD_BYTES_MAX
        )
    finally:
        os.close(descriptor)
    return Connection(reader, writer)
