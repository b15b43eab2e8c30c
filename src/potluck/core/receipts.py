"""Whether a receipt is paid, and how much: once for each attempt, never above its grant or hold.

A receipt is what a node says. The seal in its grant proves that a gateway asked for the work; the
gateway's countersignature, when it comes, says what was delivered. The lower of the two is paid.
"""

from dataclasses import dataclass

from potluck.core import pricing
from potluck.core.holds import Hold
from potluck.core.ids import BootId, GatewayId, HoldId, NodeId, RequestId
from potluck.core.pricing import Cost, Price
from potluck.core.refusals import Refusal


@dataclass(frozen=True, kw_only=True)
class Claim:
    """The part of a receipt that money depends on."""

    request: RequestId
    attempt: int
    node: NodeId
    hold: HoldId
    boot: BootId
    max_micro: int
    bill_prompt: bool
    price: Price
    prompt_tokens: int
    completion_tokens: int
    claimed: Cost


def judge(
    claim: Claim,
    *,
    sender: NodeId,
    hold: Hold | None,
    seal_ok: bool,
    paid_before_micro: int,
    countersigned_micro: int | None,
) -> Cost | Refusal:
    """What to post from the hold, or why nothing.

    `paid_before_micro` is what earlier attempts of the same request were paid: the sum over all
    attempts never exceeds the grant.
    """
    if claim.node != sender or not seal_ok:
        return Refusal.FORGED
    if hold is None:
        return Refusal.UNKNOWN_HOLD
    if hold.boot != claim.boot:
        return Refusal.UNKNOWN_HOLD
    if hold.state != "open":
        return Refusal.HOLD_VOIDED
    if claim.prompt_tokens < 0 or claim.completion_tokens < 0 or claim.attempt < 1:
        return Refusal.MALFORMED
    due = due_for(
        claim.price, claim.prompt_tokens, claim.completion_tokens, bill_prompt=claim.bill_prompt
    )
    if claim.claimed != pricing.capped(due, claim.max_micro, claim.price):
        return Refusal.PRICE_MISMATCH
    limit_micro = min(claim.max_micro - paid_before_micro, hold.rest_micro)
    if countersigned_micro is not None:
        limit_micro = min(limit_micro, countersigned_micro)
    return pricing.capped(claim.claimed, max(0, limit_micro), claim.price)


def short(
    claim: Claim, hold: Hold, *, paid_before_micro: int, countersigned_micro: int | None
) -> bool:
    """Whether only the hold keeps this from its due.

    A gateway grants no more than a hold has: somebody else's claim took it, and a correction may
    still bring it back.
    """
    due_micro = min(claim.claimed.total_micro, claim.max_micro - paid_before_micro)
    if countersigned_micro is not None:
        due_micro = min(due_micro, countersigned_micro)
    return hold.rest_micro < due_micro


def due_for(price: Price, prompt_tokens: int, completion_tokens: int, *, bill_prompt: bool) -> Cost:
    """The bill of one attempt. Nothing shown, nothing paid: the prompt alone is never billed."""
    if completion_tokens == 0:
        return pricing.FREE
    billed_prompt = prompt_tokens if bill_prompt else 0
    return pricing.cost(price, prompt_tokens=billed_prompt, completion_tokens=completion_tokens)


def fair_micro(
    price: Price, prompt_tokens: int, *, bill_prompt: bool, delivered_tokens: int, total_micro: int
) -> int:
    """What a countersignature allows for a receipt.

    A gateway whose request was cut off knows the tokens it handed on, but its total is only a
    bound, since it was never told the prompt's tokens.
    """
    due = due_for(price, prompt_tokens, delivered_tokens, bill_prompt=bill_prompt)
    return min(total_micro, due.total_micro)


def correction(settled: Cost, countersigned_micro: int, price: Price) -> Cost:
    """What a late countersignature takes back from provider and pool; zero if it agrees."""
    fair = pricing.capped(settled, countersigned_micro, price)
    return Cost(
        provider_micro=settled.provider_micro - fair.provider_micro,
        fee_micro=settled.fee_micro - fair.fee_micro,
    )


@dataclass(frozen=True, kw_only=True)
class Delivered:
    """What a gateway countersigns."""

    gateway: GatewayId
    request: RequestId
    attempt: int
    delivered_tokens: int
    total_micro: int
