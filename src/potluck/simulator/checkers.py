"""What must hold in every world, at each tick and at its end; if not: an `AssertionError`."""

from collections.abc import Sequence

from potluck.adapters.sql.inline import InlineStore
from potluck.coordinator import audit
from potluck.core.ids import RequestId
from potluck.gateway.serving.serving import Serving
from potluck.messages import money
from potluck.ports.store import Tx
from potluck.simulator.workload import Story


def books(store: InlineStore) -> None:
    """Money is conserved, holds are what accounts have pending, no grant is overdrawn."""
    violated = store.run(audit.check)
    assert not violated, "; ".join(violated)


def purses(store: InlineStore, gateway: Serving) -> None:
    """hold = settled + outstanding + granted + free, and SQL has settled no more than is used."""
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
        assert hold.settled_micro <= used_micro, f"{hold_id}: {hold} settled more than {purse}"


def streams(stories: Sequence[Story]) -> None:
    """Shown text is a prefix of the right answer: no gap, no repeat; and all of it at the end."""
    for story in stories:
        shown = story.text.encode()
        assert story.expected.startswith(shown), f"{story.requests} showed {story.text[-80:]!r}"


def bills(store: InlineStore, stories: Sequence[Story]) -> None:
    """No request is billed for more tokens than were shown, nor twice for one attempt."""
    shown = {request: story for story in stories for request in story.requests}
    billed: dict[RequestId, int] = {}
    for row in store.run(_paid):
        receipt = money.receipt_decoder.decode(row)
        billed[receipt.request] = billed.get(receipt.request, 0) + receipt.completion_tokens
    for request, tokens in billed.items():
        story = shown.get(request)
        assert story is not None, f"{request} was billed and never asked"
        seen = story.text.count(" ")
        assert tokens <= seen, f"{request} was billed for {tokens} tokens, {seen} were shown"


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
