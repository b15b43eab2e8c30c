"""The bus in memory: permissions as on the wire, and whatever faults a plan decides on.

Without faults it is a perfect network with a fixed delay, which tests use as it is.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from potluck.messages import subjects
from potluck.ports.bus import BusClosedError, BusTimeoutError, Delivery, Handler

Fate = Callable[[str, str], Sequence[int]]
"""(sender, subject) → the delay in ms of each copy that arrives; none for a lost message."""
INSTANT_MS = 0
Enter = Callable[..., Any]
"""Calls its first argument with the rest, as the process that owns the connection."""


def _directly(handler: Callable[..., Any], *arguments: Any) -> Any:
    return handler(*arguments)


def perfect(_sender: str, _subject: str) -> Sequence[int]:
    return (INSTANT_MS,)


@dataclass(slots=True)
class MemorySubscription:
    owner: "MemoryBus"
    subject: str
    handler: Handler
    queue: str
    words: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.words = tuple(self.subject.split("."))

    async def close(self) -> None:
        self.owner.network.forget(self)


class Network:
    """All connections of one simulated NATS server."""

    def __init__(self, fate: Fate = perfect) -> None:
        self.fate = fate
        self.on_deliver: Callable[[str, Delivery], None] = lambda _receiver, _delivery: None
        self._subscriptions: list[MemorySubscription] = []
        self._departures: list[tuple[MemoryBus, Callable[[str], None]]] = []
        self._turns: dict[str, int] = {}
        self._inboxes = 0

    def bus(
        self, identity: str, *, privileged: bool = False, enter: Enter = _directly
    ) -> "MemoryBus":
        """A connection that may publish under `identity` and receive what is sent to it.

        Privileged ones (coordinators) also receive at `_`, answer any inbox and hear departures.
        Handlers are called through `enter`.
        """
        return MemoryBus(self, identity, privileged=privileged, enter=enter)

    def next_inbox(self) -> int:
        """Unique for all time, so that a late answer meets no other question."""
        self._inboxes += 1
        return self._inboxes

    def route(self, sender: str, delivery: Delivery) -> None:
        for delay_ms in self.fate(sender, delivery.subject):
            loop = asyncio.get_running_loop()
            if delay_ms:
                loop.call_later(delay_ms / 1000, self._deliver, delivery)
            else:
                loop.call_soon(self._deliver, delivery)

    def _deliver(self, delivery: Delivery) -> None:
        words = delivery.subject.split(".")
        matching = [one for one in self._subscriptions if matches(one.words, words)]
        for one in self._one_of_each_queue(matching):
            if one.owner.connected:
                self.on_deliver(one.owner.identity, delivery)
                one.owner.enter(one.handler, delivery)

    def _one_of_each_queue(
        self, matching: Sequence[MemorySubscription]
    ) -> Sequence[MemorySubscription]:
        chosen = [one for one in matching if not one.queue]
        for queue in sorted({one.queue for one in matching if one.queue}):
            members = [one for one in matching if one.queue == queue]
            turn = self._turns[queue] = self._turns.get(queue, -1) + 1
            chosen.append(members[turn % len(members)])
        return chosen

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)

    def forget(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)

    def add_departures(self, owner: "MemoryBus", handler: Callable[[str], None]) -> None:
        self._departures.append((owner, handler))

    def gone(self, bus: "MemoryBus") -> None:
        """The server notices a closed connection and tells those who may know."""
        self._subscriptions = [one for one in self._subscriptions if one.owner is not bus]
        self._departures = [one for one in self._departures if one[0] is not bus]
        for owner, handler in list(self._departures):
            if owner.connected:
                asyncio.get_running_loop().call_soon(owner.enter, handler, bus.identity)


class MemoryBus:
    def __init__(self, network: Network, identity: str, *, privileged: bool, enter: Enter) -> None:
        self.network = network
        self.enter = enter
        self.identity = identity
        self.privileged = privileged
        self.refused = 0
        """Messages that permissions kept back."""
        self._open = True
        self._waiting: dict[str, asyncio.Future[bytes]] = {}

    @property
    def connected(self) -> bool:
        return self._open

    def publish(self, subject: str, payload: bytes) -> None:
        self._send(Delivery(subject, payload, ""))

    async def request(self, subject: str, payload: bytes, timeout_ms: int) -> bytes:
        reply = f"{subjects.inbox_prefix(self.identity)}.{self.network.next_inbox()}"
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        inbox = MemorySubscription(self, reply, lambda one: _answer(future, one.payload), "")
        self.network.add(inbox)
        try:
            self._send(Delivery(subject, payload, reply))
            async with asyncio.timeout(timeout_ms / 1000):
                return await future
        except TimeoutError:
            raise BusTimeoutError(subject) from None
        finally:
            self.network.forget(inbox)

    async def subscribe(
        self, subject: str, handler: Handler, queue: str = ""
    ) -> MemorySubscription:
        if not self._may_subscribe(subject):
            raise BusClosedError(f"{self.identity} may not subscribe to {subject}")
        subscription = MemorySubscription(self, subject, handler, queue)
        self.network.add(subscription)
        return subscription

    async def subscribe_departures(self, handler: Callable[[str], None]) -> MemorySubscription:
        if not self.privileged:
            raise BusClosedError(f"{self.identity} may not hear departures")
        self.network.add_departures(self, handler)
        return MemorySubscription(self, "$departures", lambda _delivery: None, "")

    async def drain(self) -> None:
        self.drop()

    def drop(self) -> None:
        """The connection closes, as when its process is killed."""
        if self._open:
            self._open = False
            self.network.gone(self)

    def _send(self, delivery: Delivery) -> None:
        if not self._open:
            raise BusClosedError("the connection is closed")
        if not self._may_publish(delivery.subject):
            self.refused += 1
            return
        self.network.route(self.identity, delivery)

    def _may_publish(self, subject: str) -> bool:
        if subject.startswith("_INBOX."):
            return self.privileged
        words = subject.split(".")
        return len(words) == 6 and words[3] == self.identity

    def _may_subscribe(self, subject: str) -> bool:
        words = subject.split(".")
        return words[-1] == self.identity or (self.privileged and words[-1] == "_")


def matches(pattern: Sequence[str], words: Sequence[str]) -> bool:
    """NATS wildcards: `*` is one word, a last `>` one or more."""
    if pattern and pattern[-1] == ">":
        head = pattern[:-1]
        return len(words) > len(head) and matches(head, words[: len(head)])
    return len(pattern) == len(words) and all(
        one in ("*", word) for one, word in zip(pattern, words, strict=True)
    )


def _answer(future: "asyncio.Future[bytes]", payload: bytes) -> None:
    if not future.done():
        future.set_result(payload)
