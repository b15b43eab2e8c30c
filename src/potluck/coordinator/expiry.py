"""Holds end by themselves, after life and grace: then the rest is the account's again.

Their ends are moments of the wall clock, which may jump while a machine sleeps: then nobody could
renew or report, and all of them are postponed by the jump.
"""

from potluck.coordinator import events, holds
from potluck.core import holds as rules
from potluck.core import parameters
from potluck.ports.store import Tx


def tidy(tx: Tx, now_ms: int) -> None:
    """Forgets answers to commands that nobody repeats any more."""
    tx.commands.prune(now_ms - parameters.commands_kept_ms, parameters.commands_pruned_per_tick)


def expire(tx: Tx, now_ms: int) -> int:
    """Voids what has lapsed, a limited number at a time. How many."""
    until_ms = now_ms - parameters.hold_grace_ms
    rows = tx.holds.open_until(until_ms, parameters.expiry_holds_per_tick)
    for row in rows:
        assert rules.lapsed(row.hold, now_ms)
        holds.void(tx, row.hold)
        events.record(
            tx, now_ms, "hold_expired", row.hold.id,
            account=row.hold.account, rest_micro=row.hold.rest_micro,
        )  # fmt: skip
    return len(rows)
