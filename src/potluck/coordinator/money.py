"""Balances changed by the core's rules, and the transfer that says so, in one place."""

from potluck.core import ledger
from potluck.core.ids import AccountId, HoldId, TransferId
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
