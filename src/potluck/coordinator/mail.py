"""What comes in and goes out over the bus, and the counting of what was dropped.

Who sent a message is read from its subject, which the server checked; never from its body.
"""

import collections
from dataclasses import dataclass
from typing import Final

from potluck.core import parameters
from potluck.core.ids import BootId, CoordinatorId
from potluck.messages import envelope, subjects
from potluck.messages.envelope import Body
from potluck.ports.bus import Bus, BusClosedError, Delivery

QUEUE: Final = "coordinators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    sender: str
    boot: BootId
    verb: str
    body: memoryview
    reply: str


class Mail:
    def __init__(self, *, pool: str, id: CoordinatorId, boot: BootId, bus: Bus) -> None:
        self.pool = pool
        self.id = id
        self.boot = boot
        self.counters: collections.Counter[str] = collections.Counter()
        self._bus = bus
        self._stamp = envelope.Stamp(boot)
        self._guard = envelope.Guard()

    @property
    def connected(self) -> bool:
        return self._bus.connected

    def open(self, delivery: Delivery) -> Letter:
        """Raises `MalformedError`, `VersionError` or `ReplayedError`."""
        sender = subjects.sender_of(delivery.subject)
        if len(delivery.payload) > parameters.body_bytes_max or len(sender) > _SENDER_MAX:
            raise envelope.MalformedError("too large")
        boot, _, _ = envelope.split(delivery.payload)
        return Letter(
            sender=sender,
            boot=boot,
            verb=subjects.verb_of(delivery.subject),
            body=self._guard.open(sender, delivery.payload),
            reply=delivery.reply,
        )

    def subject(self, verb: subjects.Verb, receiver: str) -> str:
        return subjects.subject(self.pool, self.id, verb, receiver)

    def tell(self, verb: subjects.Verb, receiver: str, body: Body) -> bool:
        return self.send(self.subject(verb, receiver), envelope.encode(body))

    def answer(self, sender: str, reply: str, body: Body) -> None:
        """Only into the asker's own inbox: a foreign one would make us speak for others."""
        if not reply:
            return
        if not reply.startswith(subjects.inbox_prefix(sender) + "."):
            self.counters["foreign_inbox"] += 1
            return
        self.send(reply, envelope.encode(body))

    def send(self, subject: str, body: bytes) -> bool:
        """A body under a fresh envelope. False: the bus is closed, is not connected now, or will
        not take it."""
        if not self._bus.connected:
            self.counters["unsent"] += 1
            return False
        try:
            self._bus.publish(subject, self._stamp.seal(body))
        except BusClosedError:
            self.counters["unsent"] += 1
            return False
        return True


_SENDER_MAX: Final = parameters.id_letters_max
