"""What must hold at every moment, checked against the whole database."""

from potluck.core.ids import AccountId
from potluck.messages import money as words
from potluck.ports.store import Tx


def check(tx: Tx) -> list[str]:
    """Each violated invariant, in words; empty if the books are right."""
    return [*_books(tx), *_replay(tx), *_pending(tx), *_settled(tx), *_debts(tx), *_receipts(tx)]


def books_balance(tx: Tx) -> bool:
    """The cheap part: no money was made or lost, and what is set aside is what holds say."""
    return not _books(tx) and not _pending(tx)


def _books(tx: Tx) -> list[str]:
    total_micro = sum(balance.posted_micro for _, balance in tx.balances.list())
    return [f"balances sum to {total_micro}, not to zero"] if total_micro else []


def _replay(tx: Tx) -> list[str]:
    kept = {account: balance.posted_micro for account, balance in tx.balances.list()}
    replayed = dict(tx.transfers.sums())
    return [
        f"{account} has {kept.get(account, 0)} posted, its transfers say {replayed.get(account, 0)}"
        for account in sorted({*kept, *replayed})
        if kept.get(account, 0) != replayed.get(account, 0)
    ]


def _pending(tx: Tx) -> list[str]:
    kept = {account: balance.pending_micro for account, balance in tx.balances.list()}
    held: dict[AccountId, int] = dict(tx.holds.pending_sums())
    return [
        f"{account} has {kept.get(account, 0)} pending, its holds say {held.get(account, 0)}"
        for account in sorted({*kept, *held})
        if kept.get(account, 0) != held.get(account, 0)
    ]


def _settled(tx: Tx) -> list[str]:
    """An open hold has settled what its receipts were paid, no more and no less.

    A correction on a voided one went to the account, and its receipts are paid less than it says.
    """
    paid = dict(tx.receipts.settled_sums())
    return [
        f"{hold.id} ({hold.state}) settled {hold.settled_micro}, "
        f"its receipts were paid {paid.get(hold.id, 0)}"
        for hold in tx.holds.settled()
        if (paid.get(hold.id, 0) > hold.settled_micro)
        or (hold.state == "open" and paid.get(hold.id, 0) < hold.settled_micro)
    ]


def _debts(tx: Tx) -> list[str]:
    """A person owes nothing, but for what a correction took back of earlier earnings."""
    persons = {row.id for row in tx.accounts.list() if row.kind == "person"}
    return [
        f"{account} owes: {balance}"
        for account, balance in tx.balances.list()
        if account in persons
        and balance.available_micro < 0
        and balance.available_micro + _taken_back(tx, account) < 0
    ]


def _taken_back(tx: Tx, account: AccountId) -> int:
    return sum(
        row.amount_micro
        for row in tx.transfers.list(account, limit=_ALL)
        if row.kind == "correction" and row.payer == account
    )


def _receipts(tx: Tx) -> list[str]:
    """The sum over all attempts of a request never exceeds its grant."""
    paid: dict[str, int] = {}
    granted: dict[str, int] = {}
    for row in tx.receipts.list(limit=_ALL):
        if row.refusal:
            continue
        receipt = words.receipt_decoder.decode(row.body)
        total_micro = row.provider_micro + row.fee_micro
        paid[row.request] = paid.get(row.request, 0) + total_micro
        granted[row.request] = max(granted.get(row.request, 0), receipt.max_micro)
    return [
        f"{request} was paid {paid[request]}, its grant was {granted[request]}"
        for request in sorted(paid)
        if paid[request] > granted[request]
    ]


_ALL = 2**62
