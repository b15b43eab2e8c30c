"""Receipts become money: once for each attempt, never above its grant, told after the commit.

A refused receipt is kept as evidence. Unless the grant's seal binds it to its sender, it is kept
under a name of its own, so that nobody can take the place of another's receipt.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from potluck.coordinator import events, money
from potluck.core import grants, holds, merkle, parameters, receipts
from potluck.core.holds import Hold
from potluck.core.ids import POOL, AccountId, GatewayId, HoldId, NodeId, ReceiptId, TransferId
from potluck.core.ids import receipt_id as name_of
from potluck.core.pricing import FREE, Cost, Price
from potluck.core.receipts import Claim
from potluck.core.refusals import Refusal
from potluck.messages import envelope, serving, subjects
from potluck.messages import money as words
from potluck.messages.money import Delivery, Receipt, ReceiptBatch, ReceiptsAck, Settled, Settlement
from potluck.ports.keys import Verifier
from potluck.ports.store import CountersignatureRow, HoldRow, ReceiptRow, TransferKind, Tx

KINDS: Final[tuple[TransferKind, ...]] = ("usage", "fee", "correction", "fee_correction")
"""Of the transfers that a receipt may cause."""


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
    countersigned: bool = False


def prove(
    batch: ReceiptBatch, node: NodeId, public_key: bytes, verifier: Verifier
) -> Batch | Refusal:
    """Root and signature checked, receipts decoded."""
    leaves = batch.receipts
    if not 1 <= len(leaves) <= parameters.receipts_per_batch_max:
        return Refusal.MALFORMED
    root, paths = merkle.proofs(leaves)
    signed = words.RECEIPTS_DOMAIN + batch.root
    if root != batch.root or not verifier.verify(public_key, batch.signature, signed):
        return Refusal.FORGED
    proven = []
    for index, path in enumerate(paths):
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
    """In one transaction with the answers that it causes (`tell`). What must wait is left out."""
    sitting = _Sitting(tx, batch, now_ms)
    found = [_settle_one(sitting, proven) for proven in batch.receipts]
    for hold in sitting.drawn.values():
        tx.holds.update(hold)
    return [one for one in found if one is not None]


def tell(tx: Tx, pool: str, sender: str, node: NodeId, outcomes: Sequence[Outcome]) -> None:
    """Into the outbox: the node's acknowledgement, and for each hold what its gateway must know."""
    if not outcomes:
        return
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
                countersigned=one.countersigned,
            )
            settled.setdefault((one.gateway, one.receipt.hold), []).append(item)
    for (gateway, hold), items in settled.items():
        body = envelope.encode(Settled(hold=hold, items=items))
        tx.outbox.add(subjects.subject(pool, sender, "settled", gateway), body)


class _Sitting:
    """One batch in one transaction, and what its receipts have in common, looked up once."""

    def __init__(self, tx: Tx, batch: Batch, now_ms: int) -> None:
        self.tx = tx
        self.batch = batch
        self.now_ms = now_ms
        self.drawn: dict[HoldId, Hold] = {}
        """Holds as this batch leaves them, written at its end."""
        self._rows: dict[HoldId, HoldRow | None] = {}
        self._models: set[str] = set()
        self._payee: AccountId | None = None

    @property
    def payee(self) -> AccountId:
        if self._payee is None:
            node = self.tx.nodes.get(self.batch.node)
            assert node is not None, "only a node that said hello is listened to"
            self._payee = node.account
        return self._payee

    def row(self, hold: HoldId) -> HoldRow | None:
        if hold not in self._rows:
            self._rows[hold] = self.tx.holds.get(hold)
        return self._rows[hold]

    def hold(self, row: HoldRow) -> Hold:
        return self.drawn.get(row.hold.id, row.hold)

    def waits(
        self, claim: Claim, row: HoldRow, paid_before_micro: int, countersigned_micro: int | None
    ) -> bool:
        """While the hold lives, what it cannot cover is not judged: its node says it again, and
        in the meantime a false claim on the hold may be corrected."""
        short = receipts.short(
            claim, self.hold(row), paid_before_micro=paid_before_micro,
            countersigned_micro=countersigned_micro,
        )  # fmt: skip
        return short and self.now_ms < row.hold.expires_ms

    def served(self, model: str) -> bool:
        """Now or before: a receipt may come late. Its price is the one that its grant sealed."""
        if not self._models:
            self._models = {row.digest for row in self.tx.deployments.list()}
        return model in self._models


def _settle_one(sitting: _Sitting, proven: Proven) -> Outcome | None:
    tx, receipt = sitting.tx, proven.receipt
    if receipt.node != sitting.batch.node:
        return _refuse(sitting, proven, Refusal.FORGED, None)
    if not _well_named(receipt) or len(proven.body) > parameters.receipt_bytes_max:
        return _refuse(sitting, proven, Refusal.MALFORMED, None)
    attempts = tx.receipts.of_request(receipt.request)
    known = next((one for one in attempts if one.id == receipt.receipt), None)
    paid_before_micro = sum(one.provider_micro + one.fee_micro for one in attempts)
    if known is not None and known.body == proven.body:
        return _again(tx, known, receipt)
    row = sitting.row(receipt.hold)
    price = serving.price_of(receipt.price)
    bound = row if row is not None and _sealed(row, receipt, price) else None
    if known is not None:
        return _refuse(sitting, proven, Refusal.ID_REUSED, None)
    said = tx.countersignatures.get(receipt.request, receipt.attempt, receipt.gateway)
    claim = _claim(receipt, price)
    allowed_micro = None if said is None else allowed(receipt, price, said)
    verdict = receipts.judge(
        claim,
        sender=sitting.batch.node,
        hold=None if row is None else sitting.hold(row),
        seal_ok=bound is not None or row is None,
        paid_before_micro=paid_before_micro,
        countersigned_micro=allowed_micro,
    )
    if not isinstance(verdict, Refusal) and not sitting.served(receipt.model):
        verdict = Refusal.DIGEST_MISMATCH
    if isinstance(verdict, Refusal):
        return _refuse(sitting, proven, verdict, bound)
    assert bound is not None
    if sitting.waits(claim, bound, paid_before_micro, allowed_micro):
        return None
    _pay(sitting, receipt, bound, verdict)
    if allowed_micro is not None:
        _compare(sitting, receipt, claim.claimed.total_micro, allowed_micro)
    tx.receipts.insert(
        _row(sitting, proven, receipt.receipt, bound.hold.account, verdict, refusal="")
    )
    return Outcome(
        receipt=receipt,
        refusal="",
        total_micro=verdict.total_micro,
        gateway=bound.hold.gateway,
        countersigned=said is not None,
    )


def allowed(receipt: Receipt, price: Price, said: Delivery | CountersignatureRow) -> int:
    """The most that its gateway's word leaves of a receipt."""
    return receipts.fair_micro(
        price, receipt.prompt_tokens, bill_prompt=receipt.bill_prompt,
        delivered_tokens=said.delivered_tokens, total_micro=said.total_micro,
    )  # fmt: skip


def _compare(
    sitting: _Sitting, receipt: Receipt, claimed_micro: int, countersigned_micro: int
) -> None:
    """An event if the gateway said before that it delivered less than this claims."""
    if countersigned_micro < claimed_micro:
        events.record(
            sitting.tx, sitting.now_ms, "receipts_differ", receipt.receipt,
            claimed_micro=claimed_micro, countersigned_micro=countersigned_micro,
        )  # fmt: skip


def _pay(sitting: _Sitting, receipt: Receipt, row: HoldRow, cost: Cost) -> None:
    tx, hold, now_ms = sitting.tx, sitting.hold(row), sitting.now_ms
    after = holds.settle(hold, cost.total_micro)
    assert not isinstance(after, Refusal), "the judge keeps within the hold"
    sitting.drawn[hold.id] = after
    parts: tuple[tuple[TransferKind, AccountId, int], ...] = (
        ("usage", sitting.payee, cost.provider_micro),
        ("fee", POOL, cost.fee_micro),
    )
    for kind, payee, amount_micro in parts:
        if amount_micro:
            money.post_held(
                tx, id=transfer_id(receipt.receipt, kind), kind=kind, payer=hold.account,
                payee=payee, amount_micro=amount_micro, cause=receipt.receipt, hold=hold.id,
                at_ms=now_ms,
            )  # fmt: skip
    events.record(
        tx, now_ms, "receipt_settled", receipt.receipt,
        account=hold.account, node=sitting.batch.node, total_micro=cost.total_micro,
    )  # fmt: skip


def transfer_id(receipt: ReceiptId, kind: str) -> TransferId:
    """Derived from its cause: a second posting of the same part would break the table's key."""
    return TransferId(f"tr_{receipt.removeprefix('rcp_')}_{kind}")


def _again(tx: Tx, known: ReceiptRow, receipt: Receipt) -> Outcome:
    said = tx.countersignatures.get(known.request, known.attempt, known.gateway)
    return Outcome(
        receipt=receipt,
        refusal=known.refusal,
        total_micro=known.provider_micro + known.fee_micro,
        gateway=known.gateway,
        countersigned=said is not None,
    )


def _refuse(sitting: _Sitting, proven: Proven, refusal: Refusal, bound: HoldRow | None) -> Outcome:
    """`bound`: the hold whose seal proves that the work was given to this node."""
    _keep_evidence(sitting, proven, refusal, bound)
    return Outcome(
        receipt=proven.receipt,
        refusal=refusal,
        total_micro=0,
        gateway=None if bound is None else bound.hold.gateway,
    )


def _keep_evidence(
    sitting: _Sitting, proven: Proven, refusal: Refusal, bound: HoldRow | None
) -> None:
    """Up to a number for each node: nobody fills our disk with what he is refused for."""
    tx, node = sitting.tx, sitting.batch.node
    kept_as = proven.receipt.receipt if bound is not None else evidence_id(node, proven.body)
    if len(proven.body) > parameters.receipt_bytes_max or tx.receipts.get(kept_as) is not None:
        return
    if tx.receipts.refused_of(node) >= parameters.evidence_per_node_max:
        return
    account = None if bound is None else bound.hold.account
    tx.receipts.insert(_row(sitting, proven, kept_as, account, FREE, refusal))
    events.record(tx, sitting.now_ms, "receipt_refused", kept_as, node=node, refusal=str(refusal))


def evidence_id(node: NodeId, body: bytes) -> ReceiptId:
    digest = hashlib.sha256(node.encode() + b"\x00" + body).hexdigest()
    return ReceiptId(f"rcp_evidence_{digest}")


def _row(
    sitting: _Sitting, proven: Proven, kept_as: ReceiptId, account: AccountId | None, cost: Cost,
    refusal: str,
) -> ReceiptRow:  # fmt: skip
    receipt, batch = proven.receipt, sitting.batch
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
        at_ms=sitting.now_ms,
    )


def _well_named(receipt: Receipt) -> bool:
    return (
        1 <= receipt.attempt <= parameters.attempts_max
        and receipt.request.startswith("req_")
        and len(receipt.request) <= parameters.id_letters_max
        and receipt.receipt == name_of(receipt.request, receipt.attempt)
    )


def _sealed(hold: HoldRow, receipt: Receipt, price: Price) -> bool:
    expected = grants.seal(
        hold.grant_key,
        request=receipt.request,
        attempt=receipt.attempt,
        node=receipt.node,
        hold=receipt.hold,
        boot=receipt.boot,
        max_micro=receipt.max_micro,
        bill_prompt=receipt.bill_prompt,
        price=price,
    )
    return receipt.gateway == hold.hold.gateway and grants.sealed(receipt.seal, expected)


def _claim(receipt: Receipt, price: Price) -> Claim:
    return Claim(
        request=receipt.request,
        attempt=receipt.attempt,
        node=receipt.node,
        hold=receipt.hold,
        boot=receipt.boot,
        max_micro=receipt.max_micro,
        bill_prompt=receipt.bill_prompt,
        price=price,
        prompt_tokens=receipt.prompt_tokens,
        completion_tokens=receipt.completion_tokens,
        claimed=Cost(provider_micro=receipt.provider_micro, fee_micro=receipt.fee_micro),
    )
