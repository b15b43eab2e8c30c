"""The keeper of a pool's processes, on virtual time: what must not end it."""

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from potluck.cli import supervisor
from potluck.cli.supervisor import Child, Supervisor
from potluck.core import parameters
from potluck.ports.processes import Command, SpawnError
from potluck.simulator.clock import LoopClock
from potluck.simulator.loop import VirtualTimeLoop


class FakeProcess:
    def __init__(self, pid: int, on_exit: Callable[[int], None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._on_exit = on_exit

    def end(self, status: int) -> None:
        self.returncode = status
        self._on_exit(status)

    async def wait(self) -> int:
        return self.returncode or 0

    async def stop(self, grace_ms: int) -> None:
        self.returncode = -15


class FakeProcesses:
    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.tried_s: list[float] = []
        self.errors: list[Exception] = []

    def limits_available(self) -> tuple[bool, str]:
        return False, "none"

    async def spawn(
        self, command: Command, on_exit: Callable[[int], None] | None = None
    ) -> FakeProcess:
        assert on_exit is not None
        self.tried_s.append(asyncio.get_running_loop().time())
        if self.errors:
            raise self.errors.pop(0)
        self.started.append(FakeProcess(len(self.started) + 1, on_exit))
        return self.started[-1]


def run(test: Callable[[], Awaitable[None]]) -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(test())  # type: ignore[arg-type]
    finally:
        loop.close()


def child(folder: Path) -> Child:
    return Child(name="nats", argv=["nats"], env={}, log=folder / "nats.log")


def test_a_full_disk_does_not_end_a_keeper(tmp_path: Path) -> None:
    async def body() -> None:
        def full() -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        processes = FakeProcesses()
        kept = Supervisor(processes, LoopClock(), full)
        await kept.start(child(tmp_path))
        for count in (1, 2, 3):
            processes.started[-1].end(1)
            await asyncio.sleep(20)
            assert len(processes.started) == count + 1
        await kept.stop()

    run(body)


@pytest.mark.parametrize(
    "error", [SpawnError("no"), OSError(errno.EMFILE, "Too many open files"), ValueError("bug")]
)
def test_what_cannot_be_started_is_tried_ever_more_rarely(tmp_path: Path, error: Exception) -> None:
    async def body() -> None:
        processes = FakeProcesses()
        kept = Supervisor(processes, LoopClock())
        await kept.start(child(tmp_path))
        await asyncio.sleep(parameters.child_settled_ms / 1_000 + 1)
        processes.errors = [error] * 10
        processes.started[0].end(1)
        await asyncio.sleep(300)
        assert len(processes.started) == 2
        tries = processes.tried_s[1:]
        pauses_ms = [round((b - a) * 1_000) for a, b in zip(tries, tries[1:], strict=False)]
        assert pauses_ms == [supervisor.back_off_ms(failures) for failures in range(2, 12)]
        await kept.stop()

    run(body)


def test_a_log_is_bounded_while_its_writer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameters, "child_log_bytes_max", 1_000)

    async def body() -> None:
        processes = FakeProcesses()
        kept = Supervisor(processes, LoopClock())
        one = child(tmp_path)
        await kept.start(one)
        with one.log.open("ab", buffering=0) as writer:
            for _ in range(5):
                writer.write(b"x" * 1_500)
                await asyncio.sleep(parameters.child_log_check_ms / 1_000 + 0.1)
                assert one.log.stat().st_size == 0
            writer.write(b"last")
        assert one.log.read_bytes() == b"last"
        assert one.log.with_name("nats.log.old").stat().st_size == 1_500
        await kept.stop()

    run(body)


def test_a_log_gives_way_where_there_is_no_room_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parameters, "child_log_bytes_max", 10)
    monkeypatch.setattr("shutil.copy", full)
    log = tmp_path / "nats.log"
    log.write_bytes(b"x" * 20)
    supervisor.rotate(log)
    assert [path.name for path in tmp_path.iterdir()] == ["nats.log"]
    assert log.stat().st_size == 0


def test_the_graces_are_long_enough_for_what_they_cover() -> None:
    node_ms = (
        parameters.agent_drain_ms
        + max(parameters.agent_drain_ms, parameters.engine_stop_grace_ms)
        + parameters.cgroup_removal_ms
    )
    assert node_ms < parameters.node_grace_ms
    assert parameters.child_streams_grace_ms < parameters.child_grace_ms
