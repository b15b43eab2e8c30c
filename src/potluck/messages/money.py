"""Holds, receipts and their answers."""

import msgspec

from potluck.core.ids import (
    AccountId,
    BootId,
    Digest,
    GatewayId,
    HoldId,
    NodeId,
    ReceiptId,
    RequestId,
)
from potluck.messages.envelope import Body
from potluck.messages.serving import WirePrice

RECEIPTS_DOMAIN = b"potluck.v1.receipts\x00"
COUNTERSIGN_DOMAIN = b"potluck.v1.countersign\x00"
"""A signature covers domain + Merkle root, so that it can be used for nothing else."""


class HoldRequest(Body):
    """Verb `hold`; answered by `HoldReply`. The same id again is answered alike."""

    hold: HoldId
    account: AccountId
    want_micro: int
    need_micro: int
    """Less than this is of no use to the asker: it is refused instead of partly held."""


class HoldRenewal(Body):
    """Verb `renew`; answered by `HoldReply`."""

    hold: HoldId


class HoldRelease(Body):
    """Verb `release`: no grant and nothing outstanding is left on it. No answer."""

    hold: HoldId


class HoldReply(Body):
    """`refusal` is empty, or the cause; then amount, life and key mean nothing."""

    hold: HoldId
    amount_micro: int
    life_ms: int
    grant_key: bytes
    """Seals grants on this hold (core/grants.seal)."""
    refusal: str = ""


class Receipt(Body):
    """What one attempt used and produced, in the node's words. Signed over these exact bytes."""

    receipt: ReceiptId
    request: RequestId
    attempt: int
    hold: HoldId
    boot: BootId
    gateway: GatewayId
    node: NodeId
    max_micro: int
    seal: bytes
    bill_prompt: bool
    price: WirePrice
    model: Digest
    engine: Digest
    tier: str
    prompt_tokens: int
    completion_tokens: int
    """Tokens the gateway acknowledged; these are billed."""
    provider_micro: int
    fee_micro: int
    queue_ms: int
    prefill_ms: int
    decode_ms: int
    input_digest: Digest
    output_digest: Digest
    outcome: str
    """`stop`, `length`, `cancelled`, `abandoned` (no acknowledgement came) or `failed`."""


class ReceiptBatch(Body):
    """Verb `receipts`: repeated until acknowledged."""

    root: bytes
    signature: bytes
    """Ed25519 (RFC 8032) by the node's key over `RECEIPTS_DOMAIN + root`."""
    receipts: list[bytes]
    """MessagePack of `Receipt`, never re-encoded; leaves of the tree in this order."""


class ReceiptsAck(Body):
    """Verb `receipts_ack`, after the commit: what the node may delete."""

    accepted: list[ReceiptId]
    refused: list[tuple[ReceiptId, str]]
    """With its cause; recorded as evidence, never paid, not to be sent again."""


class Settlement(Body):
    request: RequestId
    attempt: int
    total_micro: int
    countersigned: bool = False
    """The gateway's countersignature is stored too: it need not be repeated any more."""


class Settled(Body):
    """Verb `settled`, after the commit."""

    hold: HoldId
    items: list[Settlement]


class Delivery(Body):
    """What a gateway says it delivered of one attempt."""

    request: RequestId
    attempt: int
    delivered_tokens: int
    total_micro: int


class Countersignature(Body):
    """Verb `countersign`; one root and one Ed25519 signature over many deliveries."""

    root: bytes
    signature: bytes
    deliveries: list[bytes]
    """MessagePack of `Delivery`, leaves in this order."""


hold_request_decoder = msgspec.msgpack.Decoder(HoldRequest)
hold_renewal_decoder = msgspec.msgpack.Decoder(HoldRenewal)
hold_release_decoder = msgspec.msgpack.Decoder(HoldRelease)
hold_reply_decoder = msgspec.msgpack.Decoder(HoldReply)
receipt_decoder = msgspec.msgpack.Decoder(Receipt)
receipt_batch_decoder = msgspec.msgpack.Decoder(ReceiptBatch)
receipts_ack_decoder = msgspec.msgpack.Decoder(ReceiptsAck)
settled_decoder = msgspec.msgpack.Decoder(Settled)
delivery_decoder = msgspec.msgpack.Decoder(Delivery)
countersignature_decoder = msgspec.msgpack.Decoder(Countersignature)
