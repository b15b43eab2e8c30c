"""What must hold in every world, at each tick and at its end; if not: an `AssertionError`."""

from collections.abc import Sequence

from potluck.adapters.sql.inline import InlineStore
from potluck.coordinator import audit
from potluck.core.ids import HoldId, RequestId
from potluck.core.receipts import due_for
from potluck.gateway.serving.serving import Serving
from potluck.messages import money, serving
from potluck.ports.store import ReceiptRow, Tx
from potluck.simulator.workload import Story


def books(store: InlineStore) -> None:
    """Money is conserved, holds are what accounts have pending, no grant is overdrawn."""
    violated = store.run(audit.check)
    assert not violated, "; ".join(violated)


def purses(store: InlineStore, gateway: Serving, *, lying: bool) -> None:
    """hold = settled + outstanding + granted + free, and SQL has settled no more than is used.

    In other words: what a hold has left covers what its purse may still spend. Where a node lies,
    what it claimed is excused until its gateway's countersignature corrects it.
    """
    for held in gateway.purses.all():
        purse = held.purse
        hold_id = purse.hold
        row = store.run(lambda tx, wanted=hold_id: tx.holds.get(wanted))  # type: ignore[misc]
        assert row is not None, f"{hold_id} is in a purse, but not in the books"
        hold = row.hold
        parts_micro = (
            purse.free_micro + purse.granted_micro + purse.outstanding_micro + purse.settled_micro
        )
        assert parts_micro == hold.amount_micro, f"{hold_id}: {purse} is not {hold.amount_micro}"
        used_micro = purse.settled_micro + purse.outstanding_micro + purse.granted_micro
        if lying and hold.settled_micro > used_micro:
            used_micro += store.run(lambda tx, wanted=hold_id: _unsaid_micro(tx, wanted))  # type: ignore[misc]
        assert hold.settled_micro <= used_micro, f"{hold_id}: {hold} settled more than {purse}"


def _unsaid_micro(tx: Tx, hold: HoldId) -> int:
    """What was paid from a hold on its node's word alone."""
    return sum(
        row.provider_micro + row.fee_micro
        for row in tx.receipts.list(limit=2**31)
        if row.hold == hold and not _countersigned(tx, row)
    )


def _countersigned(tx: Tx, row: ReceiptRow) -> bool:
    return tx.countersignatures.get(row.request, row.attempt, row.gateway) is not None


def streams(stories: Sequence[Story]) -> None:
    """Shown text is a prefix of the right answer: no gap, no repeat; and all of it at the end."""
    for story in stories:
        shown = story.text.encode()
        assert story.expected.startswith(shown), f"{story.requests} showed {story.text[-80:]!r}"


def bills(store: InlineStore, stories: Sequence[Story], *, lying: bool) -> None:
    """No request is billed for more than was shown, nor twice for one attempt.

    Where a node lies, its word alone is not counted: a gateway that died may have said nothing.
    """
    shown = {request: story for story in stories for request in story.requests}
    billed_micro: dict[RequestId, int] = {}
    due_micro: dict[RequestId, int] = {}
    for row, countersigned in store.run(_settled):
        receipt = money.receipt_decoder.decode(row.body)
        story = shown.get(receipt.request)
        assert story is not None, f"{receipt.request} was billed and never asked"
        seen = story.text.count(" ")
        if not lying:
            tokens = receipt.completion_tokens
            assert tokens <= seen, f"{row.id} was billed for {tokens} tokens, {seen} were shown"
        elif not countersigned:
            continue
        due = due_for(
            serving.price_of(receipt.price), receipt.prompt_tokens, seen,
            bill_prompt=receipt.bill_prompt,
        )  # fmt: skip
        request, total_micro = receipt.request, row.provider_micro + row.fee_micro
        billed_micro[request] = billed_micro.get(request, 0) + total_micro
        due_micro[request] = max(due_micro.get(request, 0), due.total_micro)
    for request, micro in billed_micro.items():
        assert micro <= due_micro[request], (
            f"{request} was billed for {micro}, {due_micro[request]} is due"
        )


def _settled(tx: Tx) -> list[tuple[ReceiptRow, bool]]:
    rows = [row for row in tx.receipts.list(limit=2**31) if not row.refusal]
    return [(row, _countersigned(tx, row)) for row in rows]


def finished(store: InlineStore, stories: Sequence[Story]) -> None:
    """Liveness: every answer that ended well is paid, and no money is left aside."""
    paid = {money.receipt_decoder.decode(row).request for row in store.run(_paid)}
    for story in stories:
        assert story.outcome != "asked", "a requester still waits"
        if story.outcome == "finished":
            assert set(story.requests) <= paid, f"{story.requests} were delivered and never paid"
    pending = store.run(lambda tx: tx.holds.pending_sums())
    assert not any(micro for _, micro in pending), f"money is still set aside: {pending}"


def _paid(tx: Tx) -> list[bytes]:
    return [row.body for row in tx.receipts.list(limit=2**31) if not row.refusal]
