"""What goes wrong in a simulated world. Each seed draws its own mix, some faults absent.

Swarm testing: Groce et al., "Swarm Testing", ISSTA 2012.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    loss: float = 0.0
    duplicate: float = 0.0
    delay_ms_max: int = 1
    gateway_crash_ms: int | None = None
    """Mean time between crashes; None: it never crashes."""
    coordinator_crash_ms: int | None = None
    node_crash_ms: int | None = None
    engine_death_ms: int | None = None
    crash_after_commit: float = 0.0
    """Chance for each transaction that the coordinator dies between record and tell."""
    lying: bool = False
    """One node's receipts claim more than was delivered (simulator/liar)."""


CALM = Faults()


def draw(rng: random.Random) -> Faults:
    return Faults(
        loss=rng.choice((0.0, 0.01, 0.1)),
        duplicate=rng.choice((0.0, 0.05, 0.3)),
        delay_ms_max=rng.choice((1, 20, 400)),
        gateway_crash_ms=rng.choice((None, 20_000, 60_000)),
        coordinator_crash_ms=rng.choice((None, 10_000, 60_000)),
        node_crash_ms=rng.choice((None, 10_000, 60_000)),
        engine_death_ms=rng.choice((None, 20_000)),
        crash_after_commit=rng.choice((0.0, 0.0, 0.002)),
        lying=rng.choice((False, True)),
    )


class Weather:
    """Decides the fate of every message; which faults it knows may change while it runs."""

    def __init__(self, rng: random.Random, faults: Faults) -> None:
        self.faults = faults
        self._rng = rng

    def fate(self, _sender: str, _subject: str) -> Sequence[int]:
        faults, rng = self.faults, self._rng
        if faults.loss and rng.random() < faults.loss:
            return ()
        copies = 2 if faults.duplicate and rng.random() < faults.duplicate else 1
        return [rng.randint(0, faults.delay_ms_max) for _ in range(copies)]

    def next_crash_ms(self, mean_ms: int) -> int:
        return round(self._rng.expovariate(1 / mean_ms))
