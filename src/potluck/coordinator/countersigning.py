"""What gateways say they delivered, attached to receipts. Lower than the receipt: the lower is due.

Before the receipt it caps what is settled; after it, provider and pool give the difference back:
into the hold while it is open, so that hold = settled + outstanding + granted + free stays true.
Every countersignature of a settled receipt is answered, so that a lost answer heals.
"""

import dataclasses
from dataclasses import dataclass

import msgspec

from potluck.coordinator import events, money, settlement
from potluck.core import holds, merkle, parameters, receipts
from potluck.core.holds import Hold
from potluck.core.ids import GatewayId, HoldId, receipt_id
from potluck.core.pricing import Cost
from potluck.core.refusals import Refusal
from potluck.messages import envelope, serving, subjects
from potluck.messages import money as words
from potluck.messages.money import Countersignature, Delivery, Settled, Settlement
from potluck.ports.keys import Verifier
from potluck.ports.store import CountersignatureRow, ReceiptRow, TransferKind, Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """Deliveries that one valid signature covers, with their bytes and Merkle paths."""

    gateway: GatewayId
    public_key: bytes
    root: bytes
    signature: bytes
    deliveries: tuple[tuple[Delivery, bytes, bytes], ...]


def prove(
    body: Countersignature, gateway: GatewayId, public_key: bytes, verifier: Verifier
) -> Signed | Refusal:
    leaves = body.deliveries
    if not 1 <= len(leaves) <= parameters.deliveries_per_batch_max:
        return Refusal.MALFORMED
    signed = words.COUNTERSIGN_DOMAIN + body.root
    root, paths = merkle.proofs(leaves)
    if root != body.root or not verifier.verify(public_key, body.signature, signed):
        return Refusal.FORGED
    deliveries = []
    for index, path in enumerate(paths):
        try:
            delivery = words.delivery_decoder.decode(leaves[index])
        except msgspec.MsgspecError:
            continue
        if _plausible(delivery):
            proof = msgspec.msgpack.encode([index, len(leaves), path])
            deliveries.append((delivery, leaves[index], proof))
    return Signed(
        gateway=gateway,
        public_key=public_key,
        root=body.root,
        signature=body.signature,
        deliveries=tuple(deliveries),
    )


def attach(tx: Tx, signed: Signed, pool: str, sender: str, now_ms: int) -> None:
    """Records each, corrects where it must, and says what is settled, first or repeated."""
    told: dict[HoldId, list[Settlement]] = {}
    for delivery, body, path in signed.deliveries:
        receipt = tx.receipts.get(receipt_id(delivery.request, delivery.attempt))
        if receipt is not None and receipt.gateway != signed.gateway:
            continue  # Not its request.
        new = tx.countersignatures.insert(_row(signed, delivery, body, path, now_ms))
        if new and receipt is not None and not receipt.refusal:
            receipt = _correct(tx, receipt, delivery, now_ms)
        if receipt is not None:
            told.setdefault(receipt.hold, []).append(_item(receipt))
    subject = subjects.subject(pool, sender, "settled", signed.gateway)
    for hold, items in told.items():
        tx.outbox.add(subject, envelope.encode(Settled(hold=hold, items=items)))


def _correct(tx: Tx, row: ReceiptRow, delivery: Delivery, now_ms: int) -> ReceiptRow:
    settled = Cost(provider_micro=row.provider_micro, fee_micro=row.fee_micro)
    receipt = words.receipt_decoder.decode(row.body)
    price = serving.price_of(receipt.price)
    countersigned_micro = settlement.allowed(receipt, price, delivery)
    if settled.total_micro <= countersigned_micro:
        return row
    back = receipts.correction(settled, countersigned_micro, price)
    _give_back(tx, row, back, now_ms)
    events.record(
        tx, now_ms, "receipts_differ", row.id,
        claimed_micro=settled.total_micro, countersigned_micro=countersigned_micro,
    )  # fmt: skip
    provider_micro = settled.provider_micro - back.provider_micro
    fee_micro = settled.fee_micro - back.fee_micro
    tx.receipts.correct(row.id, provider_micro, fee_micro)
    return dataclasses.replace(row, provider_micro=provider_micro, fee_micro=fee_micro)


def _give_back(tx: Tx, row: ReceiptRow, back: Cost, now_ms: int) -> None:
    """Into the hold while it is open, since its gateway still counts on it; else to the account."""
    held = tx.holds.get(row.hold)
    assert held is not None, "what was settled was held"
    after = holds.unsettle(held.hold, back.total_micro)
    if isinstance(after, Hold):
        tx.holds.update(after)
    parts: tuple[tuple[TransferKind, str, int], ...] = (
        ("correction", "usage", back.provider_micro),
        ("fee_correction", "fee", back.fee_micro),
    )
    for kind, paid_as, amount_micro in parts:
        if not amount_micro:
            continue
        paid = tx.transfers.get(settlement.transfer_id(row.id, paid_as))
        assert paid is not None, "what was settled was posted"
        id = settlement.transfer_id(row.id, kind)
        if isinstance(after, Hold):
            money.return_held(
                tx, id=id, kind=kind, payer=paid.payee, payee=paid.payer,
                amount_micro=amount_micro, cause=row.id, hold=row.hold, at_ms=now_ms,
            )  # fmt: skip
        else:
            money.post(
                tx, id=id, kind=kind, payer=paid.payee, payee=paid.payer,
                amount_micro=amount_micro, cause=row.id, hold=None, at_ms=now_ms, overdraft=True,
            )  # fmt: skip


def _item(row: ReceiptRow) -> Settlement:
    return Settlement(
        request=row.request,
        attempt=row.attempt,
        total_micro=row.provider_micro + row.fee_micro,
        countersigned=True,
    )


def _row(
    signed: Signed, delivery: Delivery, body: bytes, path: bytes, now_ms: int
) -> CountersignatureRow:
    return CountersignatureRow(
        request=delivery.request,
        attempt=delivery.attempt,
        gateway=signed.gateway,
        delivered_tokens=delivery.delivered_tokens,
        total_micro=delivery.total_micro,
        body=body,
        root=signed.root,
        signature=signed.signature,
        path=path,
        public_key=signed.public_key,
        at_ms=now_ms,
    )


def _plausible(delivery: Delivery) -> bool:
    return (
        1 <= delivery.attempt <= parameters.attempts_max
        and len(delivery.request) <= parameters.id_letters_max
        and 0 <= delivery.total_micro <= parameters.amount_micro_max
        and 0 <= delivery.delivered_tokens <= parameters.amount_micro_max
    )
