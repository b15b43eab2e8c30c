"""What a node says to gateways: all words of one tick travel in one message for each gateway.

Rule: the more is under way, the longer words wait for each other, up to a tick, because a message
costs far more than a word. What is alone leaves at the end of its loop turn.
"""

import asyncio
import logging
from collections.abc import Callable

from potluck.agent.journal import Journal
from potluck.core import parameters
from potluck.core.ids import GatewayId, NodeId
from potluck.messages import envelope, subjects
from potluck.messages.serving import Frames, ToGateway
from potluck.ports.bus import Bus, BusClosedError

log = logging.getLogger(__name__)
_ITEMS_PER_MESSAGE_MAX = 64
"""Each is at most a window of 64 KiB and its logprobs, so a message stays below the bus's limit."""
_TICK_S = parameters.chunk_tick_ms / 1000
_GATHER_S = parameters.acceptance_gather_ms / 1000
_BUSY_ATTEMPTS = 20
"""With so many under way, words wait for the whole tick."""


class Outgoing:
    def __init__(
        self, *, pool: str, node: NodeId, bus: Bus, stamp: envelope.Stamp, journal: Journal
    ) -> None:
        self._pool = pool
        self._node = node
        self._bus = bus
        self._stamp = stamp
        self._journal = journal
        self._items: dict[GatewayId, list[ToGateway]] = {}
        self._writers: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._last_s = -_TICK_S
        self.attempts = 0
        """Being made now; attempts keep it."""

    def send(self, gateway: GatewayId, item: ToGateway) -> None:
        """At once, or with others if many are under way."""
        self._append(gateway, item)
        share = min(1.0, max(0, self.attempts - 1) / _BUSY_ATTEMPTS)
        self._flush_by(self._last_s + _TICK_S * share)

    def send_soon(self, gateway: GatewayId, item: ToGateway) -> None:
        """Nobody waits for it long: it goes along with the next word, or alone after a while."""
        self._append(gateway, item)
        self._flush_by(asyncio.get_running_loop().time() + _GATHER_S)

    def call_at_tick(self, writer: Callable[[], None]) -> None:
        """`writer` is called once, before the next tick's message leaves, to add what it has."""
        self._writers.append(writer)
        self._flush_by(self._last_s + _TICK_S)

    def flush(self) -> None:
        """Now; what writers add goes along."""
        self._drop_timer()
        self._last_s = asyncio.get_running_loop().time()
        writers, self._writers = self._writers, []
        for writer in writers:
            try:
                writer()
            except Exception:
                # The others' words leave all the same.
                log.exception("a chunk was not written")
        self._record()
        waiting, self._items = self._items, {}
        for gateway, items in waiting.items():
            subject = subjects.subject(self._pool, self._node, "frames", gateway)
            for start in range(0, len(items), _ITEMS_PER_MESSAGE_MAX):
                self._publish(subject, items[start : start + _ITEMS_PER_MESSAGE_MAX])
        # Writers asked for this very tick.
        self._drop_timer()

    def _record(self) -> None:
        """What is said rests on the journal. On a full disk it is said all the same: a stream that
        has begun ends well, and its receipt is in memory."""
        try:
            self._journal.flush()
        except OSError as error:
            log.error("journal: %s", error)

    def _append(self, gateway: GatewayId, item: ToGateway) -> None:
        items = self._items.get(gateway)
        if items is None:
            self._items[gateway] = [item]
        else:
            items.append(item)

    def _flush_by(self, due_s: float) -> None:
        if self._timer is not None:
            if self._due_s <= due_s:
                return
            self._timer.cancel()
        self._due_s = due_s
        # A time that is past means the end of this loop turn.
        self._timer = asyncio.get_running_loop().call_at(due_s, self.flush)

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _publish(self, subject: str, items: list[ToGateway]) -> None:
        try:
            self._bus.publish(subject, self._stamp.seal(envelope.encode(Frames(items))))
        except BusClosedError as error:
            # Chunks are kept until acknowledged, and the end of an attempt is repeated.
            log.warning("frames lost: %s", error)
