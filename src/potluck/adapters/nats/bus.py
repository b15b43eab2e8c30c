"""One process's connection to NATS, as the bus port.

Handlers are called as the socket is read, so they return at once; what must arrive is
repeated by its sender. Publishing never waits: while the server is away, messages wait for it.
"""

import asyncio
import contextlib
import json
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsPySubscription

from potluck.adapters.nats import credentials
from potluck.adapters.nats.client import Direct, DirectClient
from potluck.core import parameters
from potluck.messages import subjects
from potluck.ports.bus import BusClosedError, BusTimeoutError, Delivery, Handler

_log = logging.getLogger(__name__)
_RECONNECT_WAIT_S: Any = 0.2
"""nats-py asks for an int and takes any number."""


class NatsSubscription:
    def __init__(self, client: DirectClient, subscription: NatsPySubscription) -> None:
        self._client = client
        self._subscription = subscription

    async def close(self) -> None:
        self._client.forget(self._subscription._id)
        with contextlib.suppress(nats.errors.Error):
            await self._subscription.unsubscribe()


class NatsBus:
    """Made by `connect`."""

    def __init__(self, client: DirectClient, observer: DirectClient | None) -> None:
        self._client = client
        self._observer = observer
        self._outbox: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._pump = asyncio.get_running_loop().create_task(self._run())
        self.dropped = 0
        """Messages given up because the server was away for too long."""

    @classmethod
    async def connect(
        cls,
        url: str,
        credentials_file: Path,
        identity: str,
        *,
        observer_credentials: Path | None = None,
        timeout_ms: int = 10_000,
    ) -> "NatsBus":
        """Waits for a server that is still starting. Raises `BusClosedError`."""
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                client = await _dial(url, credentials_file, identity)
                observer = None
                if observer_credentials is not None:
                    observer = await _dial(url, observer_credentials, identity)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            raise BusClosedError(f"no NATS server at {url}: {error!r}") from error
        return cls(client, observer)

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    def publish(self, subject: str, payload: bytes) -> None:
        if self._client.is_closed:
            raise BusClosedError("the connection is closed")
        if len(payload) > parameters.payload_bytes_max:
            raise BusClosedError(f"{len(payload)} bytes are more than the bus carries")
        # What waits goes first, so that order is kept.
        if not self._outbox and self._client.send(subject.encode(), payload):
            return
        if len(self._outbox) >= parameters.bus_waiting_messages_max:
            raise BusClosedError("too much waits for the server already")
        self._outbox.append((subject, payload))
        self._empty.clear()
        self._wake.set()

    async def request(self, subject: str, payload: bytes, timeout_ms: int) -> bytes:
        try:
            answer = await self._client.request(subject, payload, timeout=timeout_ms / 1000)
        except (nats.errors.TimeoutError, nats.errors.NoRespondersError):
            raise BusTimeoutError(subject) from None
        except nats.errors.Error as error:
            raise BusClosedError(repr(error)) from error
        return bytes(answer.data)

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> NatsSubscription:
        def deliver(subject: str, payload: bytes, reply: str) -> None:
            handler(Delivery(subject, payload, reply))

        return await _subscribe(self._client, subject, deliver, queue)

    async def subscribe_departures(self, handler: Callable[[str], None]) -> NatsSubscription:
        if self._observer is None:
            raise BusClosedError("departures are heard by coordinators only")

        def deliver(_subject: str, payload: bytes, _reply: str) -> None:
            client = json.loads(payload).get("client", {})
            # The server has checked this JWT; `name` beside it is only what the client says.
            if jwt := client.get("jwt"):
                handler(credentials.name_in(jwt))

        return await _subscribe(self._observer, "$SYS.ACCOUNT.*.DISCONNECT", deliver, "")

    async def drain(self) -> None:
        deadline_s = 2.0
        with contextlib.suppress(TimeoutError, nats.errors.Error):
            async with asyncio.timeout(deadline_s):
                await self._empty.wait()
                await self._client.flush()
        self._pump.cancel()
        for client in (self._client, self._observer):
            if client is not None:
                with contextlib.suppress(nats.errors.Error, OSError):
                    await client.close()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                subject, payload = self._outbox.popleft()
                try:
                    await self._client.publish(subject, payload)
                except nats.errors.OutboundBufferLimitError:
                    self.dropped += 1
                except nats.errors.Error:
                    _log.debug("publish failed", extra={"subject": subject})
            self._empty.set()


async def _subscribe(
    client: DirectClient, subject: str, deliver: Direct, queue: str
) -> NatsSubscription:
    async def hand_over(message: Msg) -> None:
        deliver(message.subject, message.data, message.reply)

    try:
        # The first messages may come before the short way is known.
        subscription = await client.subscribe(subject, queue=queue, cb=hand_over)
        client.deliver_directly(subscription._id, deliver)
        # The server has it once this returns: nothing said afterwards is missed.
        await client.flush()
    except (nats.errors.Error, OSError) as error:
        raise BusClosedError(repr(error)) from error
    return NatsSubscription(client, subscription)


async def _dial(url: str, credentials_file: Path, identity: str) -> DirectClient:
    client = DirectClient()
    await client.connect(
        url,
        name=identity,
        user_credentials=str(credentials_file),
        inbox_prefix=subjects.inbox_prefix(identity),
        allow_reconnect=True,
        max_reconnect_attempts=-1,
        reconnect_time_wait=_RECONNECT_WAIT_S,
        connect_timeout=2,
        ping_interval=5,
        max_outstanding_pings=2,
        error_cb=_on_error,
        pending_size=parameters.bus_buffer_bytes_max,
    )
    return client


async def _on_error(error: Exception) -> None:
    # Reconnecting tries again and again; each refusal would otherwise fill the log.
    _log.debug("bus: %r", error)
