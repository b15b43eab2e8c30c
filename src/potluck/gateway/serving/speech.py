"""What a gateway says to coordinators, and how it numbers all that it says."""

import msgspec

from potluck.core import parameters
from potluck.core.ids import BootId, GatewayId
from potluck.messages import envelope, subjects
from potluck.messages.subjects import Verb
from potluck.ports.bus import Bus, BusClosedError, BusTimeoutError
from potluck.ports.clock import Clock


class Speech:
    """One stamp for everything: a receiver's replay window counts all words of one sender."""

    def __init__(self, pool: str, me: GatewayId, boot: BootId, bus: Bus, clock: Clock) -> None:
        self.pool = pool
        self.me = me
        self.boot = boot
        self.bus = bus
        self.clock = clock
        self._stamp = envelope.Stamp(boot)

    def tell(self, verb: Verb, receiver: str, body: msgspec.Struct) -> bool:
        """Handed over, or lost: whoever needs it repeats it."""
        return self.tell_on(subjects.subject(self.pool, self.me, verb, receiver), body)

    def tell_on(self, subject: str, body: msgspec.Struct) -> bool:
        try:
            self.bus.publish(subject, self._stamp.seal(envelope.encode(body)))
        except BusClosedError:
            return False
        return True

    async def ask(self, verb: Verb, body: msgspec.Struct, timeout_ms: int) -> memoryview | None:
        """The answer's body; None if none came, or one that is no message."""
        subject = subjects.to_coordinator(self.pool, self.me, verb)
        payload = self._stamp.seal(envelope.encode(body))
        try:
            return envelope.split(await self.bus.request(subject, payload, timeout_ms))[2]
        except (BusTimeoutError, BusClosedError, envelope.MalformedError):
            return None

    async def ask_again(
        self, verb: Verb, body: msgspec.Struct, timeout_ms: int
    ) -> memoryview | None:
        """Repeats a question that is answered alike each time, until `timeout_ms` have passed."""
        ends_ms = self.clock.now_ms() + timeout_ms
        while True:
            try_ends_ms = self.clock.now_ms() + parameters.hold_try_timeout_ms
            answer = await self.ask(verb, body, parameters.hold_try_timeout_ms)
            now_ms = self.clock.now_ms()
            if answer is not None or now_ms >= ends_ms:
                return answer
            # "Nobody listens" is said at once; somebody may in a moment.
            await self.clock.sleep_ms(max(1, min(try_ends_ms, ends_ms) - now_ms))
            if self.clock.now_ms() >= ends_ms:
                return None
