"""nats-py's client with a short way in and out for the token path.

nats-py puts a stream reader, two tasks and a queue between the socket and each handler, and two
tasks between a publish and the socket: about half of a gateway's cost for a small message
(bench/gateway.py). Connecting, authentication, subscriptions and reconnecting stay its own. This
uses names that nats-py does not promise; its version is pinned, and tests/contract/test_bus.py runs
over every path.
"""

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any, Final

from nats.aio.client import Client
from nats.aio.transport import TcpTransport

from potluck.core import parameters

_log = logging.getLogger(__name__)
Direct = Callable[[str, bytes, str], None]
"""(subject, payload, reply)."""
_MESSAGE: Final = re.compile(rb"MSG ([^ \r\n]+) (\d+) (?:([^ \r\n]+) )?(\d+)\r\n")
"""docs.nats.io, client protocol: subject, subscription, reply or none, bytes."""


class _ShortWayIn(asyncio.Protocol):
    """Stands before the stream reader's protocol: whole messages for direct handlers go to them
    from the socket's own callback. The rest, and what follows it, takes nats-py's way, in order."""

    def __init__(self, client: "DirectClient", onward: Any) -> None:
        self._client = client
        self._onward = onward

    def data_received(self, data: bytes) -> None:
        taken = self._client.take(data) if self._nothing_waits() else 0
        if taken < len(data):
            self._onward.data_received(data[taken:] if taken else data)

    def _nothing_waits(self) -> bool:
        """What nats-py has not finished comes first."""
        return not self._onward._stream_reader._buffer and not self._client._ps.buf

    def eof_received(self) -> bool | None:
        return bool(self._onward.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self._onward.connection_lost(exc)

    def pause_writing(self) -> None:
        self._onward.pause_writing()

    def resume_writing(self) -> None:
        self._onward.resume_writing()


class DirectClient(Client):
    def __init__(self) -> None:
        super().__init__()
        self._direct: dict[int, Direct] = {}

    def deliver_directly(self, subscription: int, handler: Direct) -> None:
        """From now on `handler` is called as soon as a message is read."""
        self._direct[subscription] = handler

    def forget(self, subscription: int) -> None:
        self._direct.pop(subscription, None)

    def send(self, subject: bytes, payload: bytes) -> bool:
        """To the socket, in order with other `send`s. False: not connected, or too much waits."""
        if not self.is_connected:
            return False
        connection: Any = self._transport
        transport = connection._io_writer.transport
        if (
            transport.is_closing()
            or transport.get_write_buffer_size() > parameters.bus_buffer_bytes_max
        ):
            return False
        self._write_pending()
        transport.write(b"PUB %b %d\r\n%b\r\n" % (subject, len(payload), payload))
        return True

    def _write_pending(self) -> None:
        """What nats-py keeps for its flusher task."""
        if self._pending_data_size > 0:
            connection: Any = self._transport
            connection.writelines(self._pending[:])
            self._pending = []
            self._pending_data_size = 0

    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        # nats-py writes the ping past what is pending: its flush would return before a
        # subscription has even left.
        self._write_pending()
        await super()._send_ping(future)

    async def _read_loop(self) -> None:
        # Begun for each connection, the first one and each after a loss.
        connection: Any = self._transport
        if isinstance(connection, TcpTransport):
            transport: Any = connection._io_writer.transport  # type: ignore[union-attr]
            transport.set_protocol(_ShortWayIn(self, transport.get_protocol()))
        await super()._read_loop()

    def take(self, data: bytes) -> int:
        """How many bytes at the beginning were whole messages for direct handlers; they have them
        now."""
        at = 0
        while (found := _MESSAGE.match(data, at)) is not None:
            begin = found.end()
            end = begin + int(found[4])
            handler = self._direct.get(int(found[2]))
            if handler is None or end + 2 > len(data):
                break
            at = end + 2
            self._hand_over(handler, found[1], data[begin:end], found[3] or b"")
        return at

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        handler = self._direct.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        self._hand_over(handler, subject, data, reply)

    def _hand_over(self, handler: Direct, subject: bytes, data: bytes, reply: bytes) -> None:
        try:
            handler(subject.decode(), data, reply.decode())
        except Exception:
            # Whatever a peer sent, the reader must live: without it this side is deaf.
            _log.exception("a message could not be delivered")
