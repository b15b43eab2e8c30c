"""What a node says to gateways: all words of one loop turn travel in one message for each gateway.

Rule: `send` costs an append; the one `call_soon` of a turn does the rest.
"""

import asyncio
import logging

from potluck.core.ids import GatewayId, NodeId
from potluck.messages import envelope, subjects
from potluck.messages.serving import Frames, ToGateway
from potluck.ports.bus import Bus, BusClosedError

log = logging.getLogger(__name__)
_ITEMS_PER_MESSAGE_MAX = 64
"""Each is at most a window of 64 KiB and its logprobs, so a message stays below the bus's limit."""


class Outgoing:
    def __init__(self, *, pool: str, node: NodeId, bus: Bus, stamp: envelope.Stamp) -> None:
        self._pool = pool
        self._node = node
        self._bus = bus
        self._stamp = stamp
        self._items: dict[GatewayId, list[ToGateway]] = {}

    def send(self, gateway: GatewayId, item: ToGateway) -> None:
        if not self._items:
            asyncio.get_running_loop().call_soon(self.flush)
        self._items.setdefault(gateway, []).append(item)

    def flush(self) -> None:
        waiting, self._items = self._items, {}
        for gateway, items in waiting.items():
            subject = subjects.subject(self._pool, self._node, "frames", gateway)
            for start in range(0, len(items), _ITEMS_PER_MESSAGE_MAX):
                body = envelope.encode(Frames(items[start : start + _ITEMS_PER_MESSAGE_MAX]))
                try:
                    self._bus.publish(subject, self._stamp.seal(body))
                except BusClosedError as error:
                    # Chunks are kept until acknowledged, and the end of an attempt is repeated.
                    log.warning("frames lost: %s", error)
