"""Ids: monotone in one process, and over restarts even if the clock goes back."""

import random
import time
from pathlib import Path

import pytest

from potluck.adapters.ids import UlidIds
from potluck.core.ids import BootId
from potluck.messages import envelope
from potluck.simulator.ids import SeededIds


@pytest.mark.parametrize("ids", [UlidIds(), SeededIds(random.Random(1))], ids=["real", "seeded"])
def test_later_ids_sort_higher_and_fit_the_envelope(ids: UlidIds | SeededIds) -> None:
    made = [ids.ulid() for _ in range(5_000)]
    assert made == sorted(set(made))
    for one in made[:50]:
        assert len(one) == 26
        assert envelope.boot_from_bytes(envelope.boot_to_bytes(BootId(one))) == one
    assert len(ids.secret(32)) == 32
    assert ids.secret(32) != ids.secret(32)


def test_a_start_after_the_clock_went_back_sorts_higher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "node" / "boot"
    now_ns = time.time_ns()
    starts = []
    for hours in (0, -1, -48, -48):
        monkeypatch.setattr(time, "time_ns", lambda at=now_ns + hours * 3_600 * 10**9: at)
        ids = UlidIds(memory)
        starts.append(ids.ulid())
        assert ids.ulid() > starts[-1]
    assert starts == sorted(set(starts))


def test_a_damaged_memory_is_no_obstacle(tmp_path: Path) -> None:
    memory = tmp_path / "boot"
    memory.write_bytes(b"nonsense")
    assert UlidIds(memory).ulid()
