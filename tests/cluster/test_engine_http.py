"""An engine that keeps to no rule: every answer ends, and memory is bounded."""

import asyncio
from pathlib import Path

import pytest

from potluck.agent.runtimes import http
from potluck.core import parameters

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def ask(folder: Path, said: bytes, step: int = 1 << 16, close: bool = True) -> tuple[bytes, bool]:
    """The body that is read of an engine that says `said`, and whether it may be asked again."""

    async def body() -> tuple[bytes, bool]:
        writers: list[asyncio.StreamWriter] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await reader.readuntil(b"\r\n\r\n")
            for at in range(0, len(said), step):
                writer.write(said[at : at + step])
                await asyncio.sleep(0)
            if close:
                writer.close()

        server = await asyncio.start_unix_server(serve, folder / "s")
        connection = await http.connect(folder / "s")
        try:
            async with asyncio.timeout(20):
                assert await connection.get("/x") == 200
                return await connection.body(), connection.reusable
        finally:
            assert connection._unread_bytes < 2 * http._UNREAD_BYTES_MAX
            connection.close()
            server.close()
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0.01)

    return asyncio.run(body())


@pytest.mark.parametrize("step", [1, 3, 1 << 16])
@pytest.mark.parametrize(
    "said",
    [
        CHUNKED + b"3\r\nabc\r\n1;x=y\r\nd\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd",
    ],
)
def test_bytes_may_come_as_they_like(tmp_path: Path, said: bytes, step: int) -> None:
    assert ask(tmp_path, said, step, close=False) == (b"abcd", True)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"x" * 200_000,
        b"HTTP/1.1 what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabcd",
        CHUNKED + b"3\r\nab",
        CHUNKED + b"-3\r\nabc\r\n",
        CHUNKED + b"zz\r\nabc\r\n",
        CHUNKED + b"3\r\nabc\r\n",
        CHUNKED + b"1" * 200_000,
        CHUNKED + b"%x\r\n" % (parameters.engine_line_bytes_max + 1),
        CHUNKED + b"0\r\n" + b"x" * 3_000_000,
    ],
)
def test_what_is_no_answer_is_refused(tmp_path: Path, said: bytes) -> None:
    with pytest.raises(http.BrokenAnswerError):
        ask(tmp_path, said)


def test_an_answer_without_end_is_cut(tmp_path: Path) -> None:
    chunk = b"%x\r\n" % 500_000 + b"x" * 500_000 + b"\r\n"
    with pytest.raises(http.BrokenAnswerError):
        ask(tmp_path, CHUNKED + chunk * 20)
