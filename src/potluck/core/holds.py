"""The life of a standing hold, as the coordinator keeps it: open, then voided.

A gateway draws on it in grants. It outlives its last renewal by a grace, because a node may still
report work that it covered; only then is the rest given back.
"""

from dataclasses import dataclass, replace
from typing import Literal

from potluck.core import parameters
from potluck.core.ids import AccountId, BootId, GatewayId, HoldId
from potluck.core.refusals import Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    id: HoldId
    account: AccountId
    gateway: GatewayId
    boot: BootId
    """The gateway's start that opened it: its epoch. Receipts of another start are refused."""
    amount_micro: int
    settled_micro: int = 0
    expires_ms: int
    state: Literal["open", "voided"] = "open"

    def __post_init__(self) -> None:
        assert 0 <= self.settled_micro <= self.amount_micro

    @property
    def rest_micro(self) -> int:
        return self.amount_micro - self.settled_micro


def size(want_micro: int, available_micro: int) -> int | Refusal:
    """A hold takes what is wanted or, near exhaustion, all there is."""
    amount_micro = min(want_micro, available_micro)
    return amount_micro if amount_micro > 0 else Refusal.INSUFFICIENT_FUNDS


def renew(hold: Hold, now_ms: int) -> Hold | Refusal:
    if hold.state != "open":
        return Refusal.HOLD_VOIDED
    return replace(hold, expires_ms=max(hold.expires_ms, now_ms + parameters.hold_life_ms))


def settle(hold: Hold, amount_micro: int) -> Hold | Refusal:
    if hold.state != "open":
        return Refusal.HOLD_VOIDED
    if amount_micro > hold.rest_micro:
        return Refusal.HOLD_EXHAUSTED
    return replace(hold, settled_micro=hold.settled_micro + amount_micro)


def unsettle(hold: Hold, amount_micro: int) -> Hold | Refusal:
    """A correction while the hold is open: what was paid too much can be drawn on again."""
    assert 0 <= amount_micro <= hold.settled_micro
    if hold.state != "open":
        return Refusal.HOLD_VOIDED
    return replace(hold, settled_micro=hold.settled_micro - amount_micro)


def lapsed(hold: Hold, now_ms: int) -> bool:
    """Whether life and grace are over, so that no honest receipt can still be under way."""
    return hold.state == "open" and now_ms >= hold.expires_ms + parameters.hold_grace_ms


def void(hold: Hold) -> Hold:
    return replace(hold, state="voided")
