"""What must not end an agent's work, nor leave something behind."""

import asyncio
import contextlib
import os
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from potluck.agent import journal as journals
from potluck.agent.attempts import Attempt
from potluck.agent.journal import Begun, Closed, Journal, Progress
from potluck.core import parameters
from potluck.messages import serving as s
from potluck.messages.money import ReceiptsAck
from potluck.ports.runtime import Ask, Finish, Piece, Prefilled
from potluck.simulator.engine import FakeEngine
from tests.cluster.node_under_test import House, run


def failing(*_: object, **__: object) -> None:
    raise OSError("a fault")


# Loops


@pytest.mark.parametrize("error", [OSError("no /proc"), psutil.AccessDenied(1)])
def test_a_node_that_cannot_measure_itself_still_says_hello_and_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def broken(*_: object) -> None:
        raise error

    async def blind(house: House) -> None:
        await house.until(lambda: house.agent.presence.refusal == "")
        beats = len(house.coordinator.beats)
        await asyncio.sleep(60)
        assert len(house.coordinator.beats) >= beats + 11
        assert house.coordinator.beats[-1].memory_free_bytes == 0

    for name in ("virtual_memory", "disk_usage", "cpu_percent"):
        monkeypatch.setattr(psutil, name, broken)
    run(blind, tmp_path)


def test_no_mistake_ends_hello_heartbeat_or_reconcile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def mistakes(house: House) -> None:
        agent = house.agent
        with monkeypatch.context() as patch:
            patch.setattr(agent.presence, "_reports", failing)
            patch.setattr(agent.presence, "_hello", failing)
            patch.setattr(agent.deployments, "_notice_dead_engines", failing)
            agent.presence.rehello()
            await asyncio.sleep(30)
        hellos, beats = len(house.coordinator.hellos), len(house.coordinator.beats)
        await asyncio.sleep(60)
        assert len(house.coordinator.hellos) == hellos + 1
        assert len(house.coordinator.beats) >= beats + 11
        await house.serve()
        house.runtime.engines[0].die()
        await house.until(lambda: len(house.runtime.engines) == 2)

    run(mistakes, tmp_path)


def test_a_mistake_in_one_attempt_leaves_the_others_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Attempt.watch

    def sometimes(self: Attempt, now_ms: int) -> None:
        if self.infer.request == "req_1":
            failing()
        watch(self, now_ms)

    async def mistake(house: House) -> None:
        await house.serve(slots=2)
        monkeypatch.setattr(Attempt, "watch", sometimes)
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(10_000)))
        house.gateway.ask(house.gateway.infer("req_2", sampling=s.Sampling(10_000)))
        await house.until(lambda: house.gateway.tokens("req_2") > 5)
        house.gateway.acknowledging = False
        await house.until(lambda: "rcp_2_1" in house.coordinator.receipts)
        assert house.agent.counters["attempt_errors"] == 1
        assert house.runtime.engines[0].running == 0
        monkeypatch.setattr(Attempt, "watch", watch)
        house.gateway.ask(house.gateway.infer("req_3", sampling=s.Sampling(10_000)))
        await house.until(lambda: "rcp_3_1" in house.coordinator.receipts)
        assert house.coordinator.receipts["rcp_3_1"].outcome == "abandoned"

    run(mistake, tmp_path)


def test_an_attempt_fails_on_any_error_of_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: FakeEngine, ask: Ask) -> AsyncIterator[Piece | Prefilled | Finish]:
        yield Prefilled(3)
        yield Piece((7,), b"seven")
        await asyncio.sleep(0.1)
        raise ZeroDivisionError("a bug")

    async def body(house: House) -> None:
        await house.serve(slots=1)
        with monkeypatch.context() as patch:
            patch.setattr(FakeEngine, "generate", broken)
            house.gateway.ask(house.gateway.infer())
            await house.until(lambda: len(house.gateway.of(s.Failed)) > 0)
        assert house.gateway.of(s.Failed)[0].code == "engine_failed"
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts)
        assert house.coordinator.receipts["rcp_1_1"].completion_tokens == 1
        # Its slot is free again.
        house.gateway.ask(house.gateway.infer("req_2"))
        await house.until(lambda: "rcp_2_1" in house.coordinator.receipts)

    run(body, tmp_path)


def test_receipts_that_cannot_be_signed_are_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(house: House) -> None:
        await house.serve()
        with monkeypatch.context() as patch:
            patch.setattr(house.signer, "sign", failing)
            house.gateway.ask(house.gateway.infer())
            await house.until(lambda: len(house.agent.receipts) == 1)
            await asyncio.sleep(3)
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts)

    run(body, tmp_path)


# Engines


def test_an_engine_that_is_being_stopped_is_stopped_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[FakeEngine] = []

    async def slow_stop(self: FakeEngine) -> None:
        self.alive = False
        await asyncio.sleep(1.5)
        ended.append(self)

    async def body(house: House) -> None:
        await house.serve()
        house.coordinator.deploy(wanted=False)
        await house.until(lambda: not house.runtime.engines[0].alive)
        assert not ended
        await house.agent.stop()
        assert ended == house.runtime.engines

    monkeypatch.setattr(FakeEngine, "stop", slow_stop)
    run(body, tmp_path)


def test_engines_are_stopped_together_and_within_the_nodes_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow_stop(self: FakeEngine) -> None:
        await asyncio.sleep(parameters.engine_stop_grace_ms / 1_000)
        self.alive = False

    async def body(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(10_000)))
        await house.until(lambda: house.gateway.tokens() > 5)
        house.gateway.acknowledging = house.coordinator.acknowledging = False
        began = asyncio.get_running_loop().time()
        await house.agent.stop()
        took_ms = (asyncio.get_running_loop().time() - began) * 1_000
        removal_ms = parameters.cgroup_removal_ms
        assert took_ms + removal_ms < parameters.node_grace_ms - 2_000
        assert not house.runtime.engines[0].alive

    monkeypatch.setattr(FakeEngine, "stop", slow_stop)
    run(body, tmp_path)


# The journal


def journal_of_three(tmp_path: Path) -> tuple[Path, list[tuple[int, int]]]:
    """A journal of three final receipts, and where each record lies."""

    async def write() -> None:
        journal = Journal(tmp_path / "journal")
        for name in ("rcp_1", "rcp_2", "rcp_3"):
            # It quotes a record of its kind: what is quoted must not be found in its place.
            quoted = journals._framed(Closed("rcp_forged", b"x"))
            journal.append(Closed(name, b"body of " + name.encode() + quoted))
        journal.flush()
        journal.close()

    asyncio.run(write())
    path = tmp_path / "journal"
    content = path.read_bytes()
    places, at = [], 0
    while at < len(content):
        size = struct.unpack_from(">I", content, at)[0] + 8
        places.append((at, at + size))
        at += size
    assert len(places) == 3
    return path, places


@pytest.mark.parametrize("where", [6, 9, 20, 24])
@pytest.mark.parametrize("which", [0, 1])
def test_a_damaged_record_costs_itself_alone(tmp_path: Path, which: int, where: int) -> None:
    path, places = journal_of_three(tmp_path)
    content = bytearray(path.read_bytes())
    content[places[which][0] + where] ^= 0x55
    path.write_bytes(content)
    left = {"rcp_1", "rcp_2", "rcp_3"} - {f"rcp_{which + 1}"}
    for _ in range(2):
        journal = Journal(path)
        assert set(journal.final) == left
        journal.close()


@pytest.mark.parametrize("where", [0, 2, 3])
def test_after_a_damaged_length_the_next_record_is_looked_for(tmp_path: Path, where: int) -> None:
    path, places = journal_of_three(tmp_path)
    content = bytearray(path.read_bytes())
    content[places[1][0] + where] ^= 0x15
    path.write_bytes(content)
    journal = Journal(path)
    assert {"rcp_1", "rcp_3"} <= set(journal.final)
    journal.close()


def test_zeros_in_the_middle_as_a_power_cut_leaves_them(tmp_path: Path) -> None:
    path, places = journal_of_three(tmp_path)
    content = bytearray(path.read_bytes())
    first, last = places[1]
    content[first:last] = bytes(last - first)
    path.write_bytes(content)
    journal = Journal(path)
    assert set(journal.final) == {"rcp_1", "rcp_3"}
    journal.close()


def test_compaction_is_on_the_disk_before_the_old_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = journal_of_three(tmp_path)
    before = path.read_bytes()
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))
        assert path.read_bytes() == before
        assert os.fstat(file).st_size == len(before)
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    Journal(path).close()
    assert synced == [str(path) + ".part"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_could_not_be_begun_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(house: House) -> None:
        await house.serve()
        journal = house.agent._journal
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", failing)
            house.gateway.ask(house.gateway.infer())
            await house.until(lambda: len(house.gateway.of(s.Failed)) > 0)
        assert house.gateway.of(s.Failed)[0].code == "store_full"
        assert not journal.unfinished
        journal.compact()
        await house.restart()
        await asyncio.sleep(10)
        assert not house.coordinator.receipts

    run(body, tmp_path)


def test_the_end_is_in_the_file_before_done_leaves(tmp_path: Path) -> None:
    async def body(house: House) -> None:
        await house.serve()
        seen: list[object] = []

        def look(item: s.ToGateway) -> bool:
            if isinstance(item, s.Done):
                copy = tmp_path / "copy"
                copy.write_bytes((tmp_path / "journal").read_bytes())
                journal = Journal(copy)
                seen.append(journal.unfinished["rcp_1_1"].ended)
                journal.close()
            return False

        house.gateway.lose = look
        house.gateway.ask(house.gateway.infer())
        await house.until(lambda: "rcp_1_1" in house.coordinator.receipts)
        assert seen
        assert all(seen)

    run(body, tmp_path)


def test_the_records_of_one_turn_are_one_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes: list[int] = []
    real = os.pwrite

    def pwrite(file: int, data: bytes, at: int) -> int:
        writes.append(len(data))
        return real(file, data, at)

    async def body() -> None:
        journal = Journal(tmp_path / "journal")
        writes.clear()
        for name in ("rcp_1", "rcp_2", "rcp_3"):
            journal.append(Closed(name, b"x"))
        assert writes == []
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(writes) == 1
        journal.close()
        again = Journal(tmp_path / "journal")
        assert len(again.final) == 3
        again.close()

    monkeypatch.setattr(os, "pwrite", pwrite)
    asyncio.run(body())


def test_what_a_full_disk_refused_is_written_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        journal = Journal(tmp_path / "journal")
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", failing)
            journal.append(Closed("rcp_1", b"x"))
            with pytest.raises(OSError, match="a fault"):
                journal.flush()
        journal.append(Closed("rcp_2", b"y"))
        journal.flush()
        journal.close()
        again = Journal(tmp_path / "journal")
        assert set(again.final) == {"rcp_1", "rcp_2"}
        again.close()

    asyncio.run(body())


def test_records_without_a_disk_stay_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "journal_compact_bytes", 10_000)

    async def body(house: House) -> None:
        await house.serve()
        journal = house.agent._journal
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(5_000)))
        await house.until(lambda: house.gateway.tokens() > 5)
        with monkeypatch.context() as patch:
            patch.setattr("os.pwrite", failing)
            for _ in range(500):
                journal.append(Progress("rcp_1_1", 1, 1, b"x" * 100))
                with contextlib.suppress(OSError):
                    journal.flush()
                assert journal._gathered_bytes < 11_000
        shown = journal.unfinished["rcp_1_1"].tokens
        journal.append(Progress("rcp_1_1", 1, 1, b"x"))
        journal.flush()
        journal.close()
        again = Journal(tmp_path / "journal")
        assert again.unfinished["rcp_1_1"].tokens == shown + 1
        again.close()
        house.agent._journal._file = os.open("/dev/null", os.O_RDWR)

    run(body, tmp_path)


# Refused receipts


def test_refused_receipts_are_private_bounded_and_appended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "receipts_refused_kept", 3)

    async def body(house: House) -> None:
        await house.serve(slots=8)
        house.coordinator.acknowledging = False
        for at in range(8):
            house.gateway.ask(house.gateway.infer(f"req_{at}"))
        await house.until(lambda: len(house.coordinator.receipts) == 8)
        for at in range(8):
            house.coordinator.say("receipts_ack", ReceiptsAck([], [(f"rcp_{at}_1", "voided")]))
        await house.until(lambda: len(house.agent.receipts) == 0)

    previous = os.umask(0)
    try:
        run(body, tmp_path)
    finally:
        os.umask(previous)
    files = sorted(tmp_path.glob("refused_receipts*"))
    assert [one.read_text().count("\n") for one in files] == [2, 3]
    assert all(stat.S_IMODE(one.stat().st_mode) == 0o600 for one in files)


def test_a_begun_record_is_read_back(tmp_path: Path) -> None:
    async def body(house: House) -> None:
        await house.serve()
        house.gateway.ask(house.gateway.infer(sampling=s.Sampling(500)))
        await house.until(lambda: house.gateway.tokens() > 3)

    run(body, tmp_path)
    content = (tmp_path / "journal").read_bytes()
    kinds = [type(record) for record, _, _ in journals._records(content)]
    assert kinds[0] is Begun
    assert Progress in kinds
