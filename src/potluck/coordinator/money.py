"""Balances changed by the core's rules, and the transfer that says so, in one place."""

from potluck.core import ledger
from potluck.core.ids import AccountId, HoldId, TransferId
from potluck.core.ledger import Balance
from potluck.core.refusals import Refusal
from potluck.ports.store import TransferKind, TransferRow, Tx


def post(
    tx: Tx, *, id: TransferId, kind: TransferKind, payer: AccountId, payee: AccountId,
    amount_micro: int, cause: str, hold: HoldId | None, at_ms: int, overdraft: bool,
) -> Refusal | None:  # fmt: skip
    """One phase: a credit, a deposit, a correction. `INSUFFICIENT_FUNDS` without `overdraft`."""
    if payer != payee:
        posted = ledger.post(
            tx.balances.get(payer), tx.balances.get(payee), amount_micro, overdraft=overdraft
        )
        if isinstance(posted, Refusal):
            return posted
        tx.balances.put(payer, posted[0])
        tx.balances.put(payee, posted[1])
    tx.transfers.insert(
        TransferRow(
            id=id, kind=kind, payer=payer, payee=payee, amount_micro=amount_micro, cause=cause,
            hold=hold, at_ms=at_ms,
        )
    )  # fmt: skip
    return None


def return_held(
    tx: Tx, *, id: TransferId, kind: TransferKind, payer: AccountId, payee: AccountId,
    amount_micro: int, cause: str, hold: HoldId, at_ms: int,
) -> None:  # fmt: skip
    """Phase two undone: `payer`, who was paid from an open hold, gives back into that hold."""
    taken = tx.balances.get(payer)
    if payer == payee:
        pending_micro = taken.pending_micro + amount_micro
        tx.balances.put(
            payer, Balance(posted_micro=taken.posted_micro, pending_micro=pending_micro)
        )
    else:
        given, taken = ledger.return_pending(tx.balances.get(payee), taken, amount_micro)
        tx.balances.put(payee, given)
        tx.balances.put(payer, taken)
    tx.transfers.insert(
        TransferRow(
            id=id, kind=kind, payer=payer, payee=payee, amount_micro=amount_micro, cause=cause,
            hold=hold, at_ms=at_ms,
        )
    )  # fmt: skip


def post_held(
    tx: Tx, *, id: TransferId, kind: TransferKind, payer: AccountId, payee: AccountId,
    amount_micro: int, cause: str, hold: HoldId, at_ms: int,
) -> None:  # fmt: skip
    """Phase two: money that a hold set aside changes hands."""
    if payer == payee:  # Who serves himself gives back what he had set aside.
        tx.balances.put(payer, ledger.release(tx.balances.get(payer), amount_micro))
    else:
        posted = ledger.post_pending(tx.balances.get(payer), tx.balances.get(payee), amount_micro)
        tx.balances.put(payer, posted[0])
        tx.balances.put(payee, posted[1])
    tx.transfers.insert(
        TransferRow(
            id=id, kind=kind, payer=payer, payee=payee, amount_micro=amount_micro, cause=cause,
            hold=hold, at_ms=at_ms,
        )
    )  # fmt: skip
