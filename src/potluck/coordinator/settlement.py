"""Receipts become money: once for each attempt, never above its grant, told after the commit.

A refused receipt is kept as evidence. Unless the grant's seal binds it to its sender, it is kept
under a name of its own, so that nobody can take the place of another's receipt.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from potluck.coordinator import events, money
from potluck.core import grants, holds, merkle, parameters, receipts
from potluck.core.ids import POOL, AccountId, GatewayId, HoldId, NodeId, ReceiptId, TransferId
from potluck.core.ids import receipt_id as name_of
from potluck.core.pricing import Cost, Price
from potluck.core.receipts import Claim
from potluck.core.refusals import Refusal
from potluck.messages import envelope, subjects
from potluck.messages import money as words
from potluck.messages.money import Receipt, ReceiptBatch, ReceiptsAck, Settled, Settlement
from potluck.ports.keys import Verifier
from potluck.ports.store import HoldRow, ReceiptRow, TransferKind, Tx


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A receipt and what proves that its node said so."""

    receipt: Receipt
    body: bytes
    path: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one valid signature covers. Leaves that are no receipts are left out."""

    node: NodeId
    public_key: bytes
    root: bytes
    signature: bytes
    receipts: tuple[Proven, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    receipt: Receipt
    refusal: str
    total_micro: int
    gateway: GatewayId | None
    """Who is told; None where no grant of its was proven."""


def prove(
    batch: ReceiptBatch, node: NodeId, public_key: bytes, verifier: Verifier
) -> Batch | Refusal:
    """Root and signature checked, receipts decoded."""
    leaves = batch.receipts
    too_many = not 1 <= len(leaves) <= parameters.receipts_per_batch_max
    if too_many or any(len(leaf) > parameters.receipt_bytes_max for leaf in leaves):
        return Refusal.MALFORMED
    signed = words.RECEIPTS_DOMAIN + batch.root
    if merkle.root(leaves) != batch.root or not verifier.verify(
        public_key, batch.signature, signed
    ):
        return Refusal.FORGED
    proven = []
    for index, path in enumerate(merkle.paths(leaves)):
        try:
            receipt = words.receipt_decoder.decode(leaves[index])
        except msgspec.MsgspecError:
            continue  # It cannot even be named; its neighbours are paid all the same.
        encoded = msgspec.msgpack.encode([index, len(leaves), path])
        proven.append(Proven(receipt=receipt, body=leaves[index], path=encoded))
    return Batch(
        node=node,
        public_key=public_key,
        root=batch.root,
        signature=batch.signature,
        receipts=tuple(proven),
    )


def singly(batch: Batch) -> list[Batch]:
    """The same receipts, to be settled each in a transaction of its own."""
    return [dataclasses.replace(batch, receipts=(one,)) for one in batch.receipts]


def settle(tx: Tx, batch: Batch, now_ms: int) -> list[Outcome]:
    """In one transaction with the answers that it causes (`tell`)."""
    return [_settle_one(tx, batch, proven, now_ms) for proven in batch.receipts]


def tell(tx: Tx, pool: str, sender: str, node: NodeId, outcomes: Sequence[Outcome]) -> None:
    """Into the outbox: the node's acknowledgement, and for each hold what its gateway must know."""
    ack = ReceiptsAck(
        accepted=[one.receipt.receipt for one in outcomes if not one.refusal],
        refused=[(one.receipt.receipt, one.refusal) for one in outcomes if one.refusal],
    )
    tx.outbox.add(subjects.subject(pool, sender, "receipts_ack", node), envelope.encode(ack))
    settled: dict[tuple[GatewayId, HoldId], list[Settlement]] = {}
    for one in outcomes:
        if one.gateway is not None:
            item = Settlement(
                request=one.receipt.request,
                attempt=one.receipt.attempt,
                total_micro=one.total_micro,
            )
            settled.setdefault((one.gateway, one.receipt.hold), []).append(item)
    for (gateway, hold), items in settled.items():
        body = envelope.encode(Settled(hold=hold, items=items))
        tx.outbox.add(subjects.subject(pool, sender, "settled", gateway), body)


def _settle_one(tx: Tx, batch: Batch, proven: Proven, now_ms: int) -> Outcome:
    receipt = proven.receipt
    if receipt.node != batch.node:
        return _refuse(tx, batch, proven, Refusal.FORGED, None, now_ms)
    if not _well_named(receipt):
        return _refuse(tx, batch, proven, Refusal.MALFORMED, None, now_ms)
    known = tx.receipts.get(receipt.receipt)
    if known is not None and known.body == proven.body:
        return _again(known, receipt)
    hold = tx.holds.get(receipt.hold)
    sealed = hold is not None and _sealed(hold, receipt)
    if known is not None:
        return _refuse(tx, batch, proven, Refusal.ID_REUSED, None, now_ms)
    verdict = _judge(tx, batch, receipt, hold, sealed)
    if isinstance(verdict, Refusal):
        return _refuse(tx, batch, proven, verdict, hold if sealed else None, now_ms)
    assert hold is not None
    _pay(tx, batch, receipt, hold, verdict, now_ms)
    _compare(tx, receipt, now_ms)
    tx.receipts.insert(_row(batch, proven, receipt.receipt, hold.hold.account, verdict, "", now_ms))
    return Outcome(
        receipt=receipt, refusal="", total_micro=verdict.total_micro, gateway=hold.hold.gateway
    )


def _judge(
    tx: Tx, batch: Batch, receipt: Receipt, hold: HoldRow | None, sealed: bool
) -> Cost | Refusal:
    before = tx.receipts.of_request(receipt.request)
    verdict = receipts.judge(
        _claim(receipt),
        sender=batch.node,
        hold=None if hold is None else hold.hold,
        seal_ok=sealed or hold is None,
        paid_before_micro=sum(row.provider_micro + row.fee_micro for row in before),
        countersigned_micro=_countersigned_micro(tx, receipt),
    )
    return verdict if isinstance(verdict, Refusal) else _at_our_price(tx, receipt) or verdict


def _countersigned_micro(tx: Tx, receipt: Receipt) -> int | None:
    row = tx.countersignatures.get(receipt.request, receipt.attempt)
    return row.total_micro if row is not None and row.gateway == receipt.gateway else None


def _compare(tx: Tx, receipt: Receipt, now_ms: int) -> None:
    """An event if the gateway said before that it delivered less than this claims."""
    countersigned_micro = _countersigned_micro(tx, receipt)
    claimed_micro = receipt.provider_micro + receipt.fee_micro
    if countersigned_micro is not None and countersigned_micro < claimed_micro:
        events.record(
            tx, now_ms, "receipts_differ", receipt.receipt,
            claimed_micro=claimed_micro, countersigned_micro=countersigned_micro,
        )  # fmt: skip


def _at_our_price(tx: Tx, receipt: Receipt) -> Refusal | None:
    served = [row for row in tx.deployments.list() if row.digest == receipt.model]
    if not served:
        return Refusal.DIGEST_MISMATCH
    price = receipt.price
    asked = (price.input_micro_per_mtok, price.output_micro_per_mtok, price.fee_basis_points)
    ours = [
        (row.input_micro_per_mtok, row.output_micro_per_mtok, row.fee_basis_points)
        for row in served
    ]
    return None if asked in ours else Refusal.PRICE_MISMATCH


def _pay(tx: Tx, batch: Batch, receipt: Receipt, hold: HoldRow, cost: Cost, now_ms: int) -> None:
    node = tx.nodes.get(batch.node)
    assert node is not None, "only a node that said hello is listened to"
    after = holds.settle(hold.hold, cost.total_micro)
    assert not isinstance(after, Refusal), "the judge keeps within the hold"
    tx.holds.update(after)
    parts: tuple[tuple[TransferKind, AccountId, int], ...] = (
        ("usage", node.account, cost.provider_micro),
        ("fee", POOL, cost.fee_micro),
    )
    for kind, payee, amount_micro in parts:
        if amount_micro:
            money.post_held(
                tx,
                id=transfer_id(receipt.receipt, kind),
                kind=kind,
                payer=hold.hold.account,
                payee=payee,
                amount_micro=amount_micro,
                cause=receipt.receipt,
                hold=hold.hold.id,
                at_ms=now_ms,
            )
    events.record(
        tx, now_ms, "receipt_settled", receipt.receipt,
        account=hold.hold.account, node=batch.node, total_micro=cost.total_micro,
    )  # fmt: skip


def transfer_id(receipt: ReceiptId, kind: str) -> TransferId:
    """Derived from its cause: a second posting of the same part would break the table's key."""
    return TransferId(f"tr_{receipt.removeprefix('rcp_')}_{kind}")


def _again(known: ReceiptRow, receipt: Receipt) -> Outcome:
    return Outcome(
        receipt=receipt,
        refusal=known.refusal,
        total_micro=known.provider_micro + known.fee_micro,
        gateway=known.gateway,
    )


def _refuse(
    tx: Tx, batch: Batch, proven: Proven, refusal: Refusal, bound: HoldRow | None, now_ms: int
) -> Outcome:
    """`bound`: the hold whose seal proves that the work was given to this node."""
    account = None if bound is None else bound.hold.account
    receipt = proven.receipt
    kept_as = receipt.receipt if bound is not None else evidence_id(batch.node, proven.body)
    if tx.receipts.get(kept_as) is None:
        cost = Cost(provider_micro=0, fee_micro=0)
        tx.receipts.insert(_row(batch, proven, kept_as, account, cost, refusal, now_ms))
        events.record(tx, now_ms, "receipt_refused", kept_as, node=batch.node, refusal=str(refusal))
    return Outcome(
        receipt=receipt,
        refusal=refusal,
        total_micro=0,
        gateway=None if bound is None else bound.hold.gateway,
    )


def evidence_id(node: NodeId, body: bytes) -> ReceiptId:
    digest = hashlib.sha256(node.encode() + b"\x00" + body).hexdigest()
    return ReceiptId(f"rcp_evidence_{digest}")


def _row(
    batch: Batch, proven: Proven, kept_as: ReceiptId, account: AccountId | None, cost: Cost,
    refusal: str, now_ms: int,
) -> ReceiptRow:  # fmt: skip
    receipt = proven.receipt
    return ReceiptRow(
        id=kept_as,
        request=receipt.request,
        attempt=min(max(receipt.attempt, 0), parameters.evidence_attempt_max),
        account=account,
        node=batch.node,
        gateway=receipt.gateway,
        hold=receipt.hold,
        body=proven.body,
        root=batch.root,
        signature=batch.signature,
        path=proven.path,
        public_key=batch.public_key,
        provider_micro=cost.provider_micro,
        fee_micro=cost.fee_micro,
        refusal=refusal,
        at_ms=now_ms,
    )


def _well_named(receipt: Receipt) -> bool:
    return (
        1 <= receipt.attempt <= parameters.attempts_max
        and receipt.request.startswith("req_")
        and len(receipt.request) <= parameters.id_letters_max
        and receipt.receipt == name_of(receipt.request, receipt.attempt)
    )


def _sealed(hold: HoldRow, receipt: Receipt) -> bool:
    expected = grants.seal(
        hold.grant_key,
        request=receipt.request,
        attempt=receipt.attempt,
        node=receipt.node,
        hold=receipt.hold,
        boot=receipt.boot,
        max_micro=receipt.max_micro,
        bill_prompt=receipt.bill_prompt,
        price=_price(receipt),
    )
    return receipt.gateway == hold.hold.gateway and grants.sealed(receipt.seal, expected)


def _price(receipt: Receipt) -> Price:
    price = receipt.price
    return Price(
        input_micro_per_mtok=price.input_micro_per_mtok,
        output_micro_per_mtok=price.output_micro_per_mtok,
        fee_basis_points=price.fee_basis_points,
    )


def _claim(receipt: Receipt) -> Claim:
    return Claim(
        request=receipt.request,
        attempt=receipt.attempt,
        node=receipt.node,
        hold=receipt.hold,
        boot=receipt.boot,
        max_micro=receipt.max_micro,
        bill_prompt=receipt.bill_prompt,
        price=_price(receipt),
        prompt_tokens=receipt.prompt_tokens,
        completion_tokens=receipt.completion_tokens,
        claimed=Cost(provider_micro=receipt.provider_micro, fee_micro=receipt.fee_micro),
    )
