"""How parts of the network talk: at least once, at most once, in no sure order, possibly never."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Delivery:
    subject: str
    payload: bytes
    reply: str
    """Where an answer is awaited; empty if none is."""


Handler = Callable[[Delivery], None]
"""Called on the loop, must return at once; longer work is a task of the handler's owner."""


class BusTimeoutError(Exception):
    """No answer came in time. Whether the request arrived is not known."""


class BusClosedError(Exception):
    """The bus is closed, or refuses what is asked (too large, not permitted)."""


class Subscription(Protocol):
    async def close(self) -> None: ...


class Bus(Protocol):
    @property
    def connected(self) -> bool: ...

    def publish(self, subject: str, payload: bytes) -> None:
        """Hand over, without waiting. May be lost. Raises `BusClosedError`."""

    async def request(self, subject: str, payload: bytes, timeout_ms: int) -> bytes:
        """Raises `BusTimeoutError` or `BusClosedError`."""

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """`*` matches one word, a last `>` all that follow. Of one queue group, one member gets
        each message."""

    async def subscribe_departures(self, handler: Callable[[str], None]) -> Subscription:
        """Hear the id of each identity whose connection closed. Needs the right to (coordinator);
        raises `BusClosedError` without it."""

    async def drain(self) -> None:
        """Send what was handed over, then close."""
