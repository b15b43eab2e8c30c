"""A node that lies: its receipts claim twice the tokens that were delivered, well signed.

Its gateway's countersignatures, and nothing else, tell the truth.
"""

from collections.abc import Callable
from typing import Final

from potluck.agent import billing
from potluck.core import merkle
from potluck.messages import envelope, money, subjects
from potluck.messages.money import RECEIPTS_DOMAIN, ReceiptBatch
from potluck.ports.bus import Bus, Handler, Subscription
from potluck.ports.keys import Signer

TIMES: Final = 2


class LyingBus:
    """`ports.bus.Bus`: the node's own, with its receipts rewritten on the way out."""

    def __init__(self, inner: Bus, signer: Signer, lies: Callable[[], bool]) -> None:
        self._inner = inner
        self._signer = signer
        self._lies = lies

    @property
    def connected(self) -> bool:
        return self._inner.connected

    def publish(self, subject: str, payload: bytes) -> None:
        if subjects.verb_of(subject) == "receipts" and self._lies():
            head, body = payload[: envelope.HEADER_BYTES], payload[envelope.HEADER_BYTES :]
            payload = head + envelope.encode(self._false(money.receipt_batch_decoder.decode(body)))
        self._inner.publish(subject, payload)

    async def request(self, subject: str, payload: bytes, timeout_ms: int) -> bytes:
        return await self._inner.request(subject, payload, timeout_ms)

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        return await self._inner.subscribe(subject, handler, queue)

    async def subscribe_departures(self, handler: Callable[[str], None]) -> Subscription:
        return await self._inner.subscribe_departures(handler)

    async def drain(self) -> None:
        await self._inner.drain()

    def _false(self, batch: ReceiptBatch) -> ReceiptBatch:
        leaves = []
        for leaf in batch.receipts:
            receipt = money.receipt_decoder.decode(leaf)
            billing.bill(receipt, receipt.completion_tokens * TIMES)
            leaves.append(envelope.encode(receipt))
        root = merkle.root(leaves)
        signature = self._signer.sign(RECEIPTS_DOMAIN + root)
        return ReceiptBatch(root=root, signature=signature, receipts=leaves)
