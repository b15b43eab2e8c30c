"""Planted faults in the rules. A mutant that no checker finds means that a checker is missing."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from potluck.agent.receipts import Receipts
from potluck.coordinator import holds as hold_use_cases
from potluck.coordinator import reconcile, settlement
from potluck.core import holds as hold_rules
from potluck.core.delivery import Inbound, Outbound
from potluck.core.pricing import Cost
from potluck.core.refusals import Refusal
from potluck.gateway.serving.conversations import Conversations
from potluck.gateway.serving.purses import Held
from potluck.simulator import world

SEEDS = range(20)


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    found_by: str
    """Part of what the checker says."""


def no_order(patch: pytest.MonkeyPatch) -> None:
    def take(self: Inbound, seq: int) -> bool:
        self.next_seq = max(self.next_seq, seq + 1)
        return True

    patch.setattr(Inbound, "take", take)


def lost_void(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hold_use_cases, "void", lambda tx, hold: tx.holds.update(hold_rules.void(hold)))


def double_post(patch: pytest.MonkeyPatch) -> None:
    count = itertools.count()
    settle_one = settlement._settle_one

    def settle(sitting, proven):
        known = sitting.tx.receipts.get(proven.receipt.receipt)
        outcome = settle_one(sitting, proven)
        row = sitting.row(proven.receipt.hold)
        if known is not None and row is not None and outcome is not None and outcome.total_micro:
            cost = Cost(provider_micro=known.provider_micro, fee_micro=known.fee_micro)
            hold = sitting.hold(row)
            if hold.state == "open" and hold.rest_micro >= cost.total_micro:
                settlement._pay(sitting, proven.receipt, row, cost)
        return outcome

    patch.setattr(settlement, "transfer_id", lambda receipt, kind: f"tr_{next(count)}")
    patch.setattr(settlement, "_settle_one", settle)


def closed_grants_cost_nothing(patch: pytest.MonkeyPatch) -> None:
    close = Held.close
    patch.setattr(
        Held,
        "close",
        lambda self, attempt, *, max_micro, used_micro: close(
            self, attempt, max_micro=max_micro, used_micro=0
        ),
    )


def unacknowledged_tokens_are_billed(patch: pytest.MonkeyPatch) -> None:
    push = Outbound.push

    def greedy(self, chunk, *, size_bytes, tokens):
        self.acknowledged_tokens += tokens
        return push(self, chunk, size_bytes=size_bytes, tokens=0)

    patch.setattr(Outbound, "push", greedy)


def receipts_are_sent_once(patch: pytest.MonkeyPatch) -> None:
    tick = Receipts._tick

    def once(self: Receipts) -> None:
        tick(self)
        self.close()
        self._wake_at = lambda _due_ms: None  # type: ignore[method-assign]

    patch.setattr(Receipts, "_tick", once)


def deployed_once(patch: pytest.MonkeyPatch) -> None:
    told: set[str] = set()
    differs = reconcile.differs

    def once(member, deploy):
        new = member.node.id not in told
        told.add(member.node.id)
        return new and differs(member, deploy)

    patch.setattr(reconcile, "differs", once)


def acknowledged_before_handed_on(patch: pytest.MonkeyPatch) -> None:
    chunk_came = Conversations._chunk

    def hasty(self, life, chunk, now_ms):
        chunk_came(self, life, chunk, now_ms)
        shown = life.handed_seq
        life.handed_seq = max(shown, life.inbound.next_seq - 1)
        self._acknowledge(life, now_ms)
        life.handed_seq = shown

    patch.setattr(Conversations, "_chunk", hasty)


def waiting_tokens_are_billed(patch: pytest.MonkeyPatch) -> None:
    abort = Conversations._abort

    def greedy(self, life):
        if life.pending:
            life.handed_seq = life.pending[-1].seq
            life.handed_tokens += sum(len(chunk.token_ids) for chunk in life.pending)
        abort(self, life)

    patch.setattr(Conversations, "_abort", greedy)


def corrections_leave_the_hold(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hold_rules, "unsettle", lambda hold, amount_micro: Refusal.HOLD_VOIDED)


MUTANTS = [
    Mutant("chunks in any order", no_order, "showed"),
    Mutant("a void that gives nothing back", lost_void, "pending"),
    Mutant("a repeated receipt is paid again", double_post, "receipts were paid"),
    Mutant("closed grants cost nothing", closed_grants_cost_nothing, "settled more"),
    Mutant("unacknowledged tokens are billed", unacknowledged_tokens_are_billed, "was billed for"),
    Mutant("receipts are sent once", receipts_are_sent_once, "never paid"),
    Mutant("a node is told once what to serve", deployed_once, "at the end"),
    Mutant("acknowledged before handed on", acknowledged_before_handed_on, "was billed for"),
    Mutant("who leaves pays for what waited", waiting_tokens_are_billed, "was billed for"),
    Mutant("corrections leave the hold", corrections_leave_the_hold, "receipts were paid"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.plant(monkeypatch)
    for seed in SEEDS:
        violation = violated(seed)
        if violation is not None:
            assert mutant.found_by in violation
            return
    pytest.fail(f"no world of {len(SEEDS)} noticed: {mutant.name}")


def violated(seed: int) -> str | None:
    """What a checker said of this world, if it said anything."""
    try:
        world.run(seed)
    except AssertionError as error:
        return str(error)
    return None
