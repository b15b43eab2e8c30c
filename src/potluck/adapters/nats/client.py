"""nats-py's client with a short way in and out for the token path.

nats-py puts a queue and a task between the socket and each handler, and two tasks between a publish
and the socket: about half of a gateway's cost for a small message (bench/gateway.py). Connecting,
authentication, subscriptions and reconnecting stay its own. This uses names that nats-py does not
promise; its version is pinned, and tests/contract/test_bus.py runs over every path.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from nats.aio.client import Client

from potluck.core import parameters

_log = logging.getLogger(__name__)
Direct = Callable[[str, bytes, str], None]
"""(subject, payload, reply)."""


class DirectClient(Client):
    def __init__(self) -> None:
        super().__init__()
        self._direct: dict[int, Direct] = {}

    def deliver_directly(self, subscription: int, handler: Direct) -> None:
        """From now on `handler` is called by the reading task itself."""
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

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        handler = self._direct.get(sid)
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            handler(subject.decode(), data, reply.decode())
        except Exception:
            # Whatever a peer sent, the reading task must live: without it this side is deaf.
            _log.exception("a message could not be delivered")
