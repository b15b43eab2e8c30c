"""Twenty worlds live through their faults; equal seeds live equal lives."""

import pytest

from potluck.simulator import world
from potluck.simulator.world import Outcome

SEEDS = range(20)
_lived: dict[int, Outcome] = {}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_world_keeps_its_rules(seed: int) -> None:
    _lived[seed] = world.run(seed)


def test_the_worlds_were_not_idle() -> None:
    """Faults of every kind happened, and most answers were given all the same."""
    outcomes = [_lived.get(seed) or world.run(seed) for seed in SEEDS]
    assert sum(one.crashes for one in outcomes) > 50
    assert sum(one.finished for one in outcomes) > sum(one.requests for one in outcomes) // 2
    drawn = [one.faults for one in outcomes]
    assert any(one.loss for one in drawn)
    assert any(one.duplicate for one in drawn)
    assert any(one.gateway_crash_ms for one in drawn)
    assert any(one.coordinator_crash_ms for one in drawn)
    assert any(one.node_crash_ms for one in drawn)
    assert any(one.engine_death_ms for one in drawn)
    assert any(one.crash_after_commit for one in drawn)
    assert any(one.lying for one in drawn)


@pytest.mark.parametrize("seed", [0, 3, 13])
def test_equal_seeds_live_equal_lives(seed: int) -> None:
    first = _lived.get(seed) or world.run(seed)
    assert world.run(seed) == first


def test_other_seeds_live_other_lives() -> None:
    assert world.run(1).digest != world.run(2).digest
