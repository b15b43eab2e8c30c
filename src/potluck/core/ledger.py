"""Double entry in two phases: a hold is pending until it is posted, voided or expired.

Amounts are whole micro-credits. A balance changes only through these functions, and no function
makes or loses money: what one account gains another loses in the same call.
"""

from dataclasses import dataclass, replace

from potluck.core.refusals import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    posted_micro: int = 0
    pending_micro: int = 0
    """Set aside by open holds; part of `posted_micro`, not beside it."""

    @property
    def available_micro(self) -> int:
        return self.posted_micro - self.pending_micro


def set_aside(balance: Balance, amount_micro: int) -> Balance | Refusal:
    """Phase one: a hold takes from what is available."""
    assert amount_micro > 0
    if balance.available_micro < amount_micro:
        return Refusal.INSUFFICIENT_FUNDS
    return replace(balance, pending_micro=balance.pending_micro + amount_micro)


def release(balance: Balance, amount_micro: int) -> Balance:
    """Phase two, unused part: a void or an expiry gives back what was set aside."""
    assert 0 <= amount_micro <= balance.pending_micro
    return replace(balance, pending_micro=balance.pending_micro - amount_micro)


def post_pending(payer: Balance, payee: Balance, amount_micro: int) -> tuple[Balance, Balance]:
    """Phase two, used part: money that was set aside changes hands."""
    assert 0 <= amount_micro <= payer.pending_micro
    return (
        Balance(
            posted_micro=payer.posted_micro - amount_micro,
            pending_micro=payer.pending_micro - amount_micro,
        ),
        Balance(posted_micro=payee.posted_micro + amount_micro, pending_micro=payee.pending_micro),
    )


def return_pending(payer: Balance, payee: Balance, amount_micro: int) -> tuple[Balance, Balance]:
    """Phase two undone: the payee, even overdrawn, gives back, and the payer has it set aside."""
    assert amount_micro >= 0
    return (
        Balance(
            posted_micro=payer.posted_micro + amount_micro,
            pending_micro=payer.pending_micro + amount_micro,
        ),
        replace(payee, posted_micro=payee.posted_micro - amount_micro),
    )


def post(
    payer: Balance, payee: Balance, amount_micro: int, *, overdraft: bool = False
) -> tuple[Balance, Balance] | Refusal:
    """One phase. Only the mint, and a correction against a payee, may overdraw."""
    assert amount_micro > 0
    if not overdraft and payer.available_micro < amount_micro:
        return Refusal.INSUFFICIENT_FUNDS
    # Spelled out, since `replace` takes four times as long and every transfer passes here.
    return (
        Balance(posted_micro=payer.posted_micro - amount_micro, pending_micro=payer.pending_micro),
        Balance(posted_micro=payee.posted_micro + amount_micro, pending_micro=payee.pending_micro),
    )
