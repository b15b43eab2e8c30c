"""What gateways say they delivered, attached to receipts. Lower than the receipt: the lower is due.

Before the receipt it caps what is settled; after it, provider and pool give the difference back.
"""

import dataclasses
from dataclasses import dataclass

import msgspec

from potluck.coordinator import events, money, settlement
from potluck.core import merkle, parameters, receipts
from potluck.core.ids import GatewayId, receipt_id
from potluck.core.pricing import Cost, Price
from potluck.core.refusals import Refusal
from potluck.messages import envelope, subjects
from potluck.messages import money as words
from potluck.messages.money import Countersignature, Delivery, Settled, Settlement
from potluck.ports.keys import Verifier
from potluck.ports.store import CountersignatureRow, ReceiptRow, Tx


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
    if merkle.root(leaves) != body.root or not verifier.verify(public_key, body.signature, signed):
        return Refusal.FORGED
    deliveries = []
    for index, path in enumerate(merkle.paths(leaves)):
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
    """Records each, corrects where it must, and tells the gateway once more what is settled."""
    for delivery, body, path in signed.deliveries:
        receipt = tx.receipts.get(receipt_id(delivery.request, delivery.attempt))
        if receipt is not None and receipt.gateway != signed.gateway:
            continue  # Not its request.
        if tx.countersignatures.get(delivery.request, delivery.attempt) is None:
            tx.countersignatures.insert(_row(signed, delivery, body, path, now_ms))
            if receipt is not None and not receipt.refusal:
                receipt = _correct(tx, receipt, delivery.total_micro, now_ms)
        if receipt is not None:
            # The first telling may have been lost on the way; told twice is harmless.
            settled = Settled(hold=receipt.hold, items=[_item(receipt)])
            subject = subjects.subject(pool, sender, "settled", signed.gateway)
            tx.outbox.add(subject, envelope.encode(settled))


def _correct(tx: Tx, row: ReceiptRow, countersigned_micro: int, now_ms: int) -> ReceiptRow:
    settled = Cost(provider_micro=row.provider_micro, fee_micro=row.fee_micro)
    receipt = words.receipt_decoder.decode(row.body)
    price = Price(
        input_micro_per_mtok=receipt.price.input_micro_per_mtok,
        output_micro_per_mtok=receipt.price.output_micro_per_mtok,
        fee_basis_points=receipt.price.fee_basis_points,
    )
    back = receipts.correction(settled, countersigned_micro, price)
    if back.total_micro == 0:
        return row
    for kind, paid_as, amount_micro in (
        ("correction", "usage", back.provider_micro),
        ("fee_correction", "fee", back.fee_micro),
    ):
        paid = tx.transfers.get(settlement.transfer_id(row.id, paid_as))
        if amount_micro:
            assert paid is not None, "what was settled was posted"
            money.post(
                tx,
                id=settlement.transfer_id(row.id, kind),
                kind="correction" if kind == "correction" else "fee_correction",
                payer=paid.payee,
                payee=paid.payer,
                amount_micro=amount_micro,
                cause=row.id,
                hold=None,
                at_ms=now_ms,
                overdraft=True,
            )
    events.record(
        tx, now_ms, "receipts_differ", row.id,
        claimed_micro=settled.total_micro, countersigned_micro=countersigned_micro,
    )  # fmt: skip
    provider_micro = settled.provider_micro - back.provider_micro
    fee_micro = settled.fee_micro - back.fee_micro
    tx.receipts.correct(row.id, provider_micro, fee_micro)
    return dataclasses.replace(row, provider_micro=provider_micro, fee_micro=fee_micro)


def _item(row: ReceiptRow) -> Settlement:
    return Settlement(
        request=row.request,
        attempt=row.attempt,
        total_micro=row.provider_micro + row.fee_micro,
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
