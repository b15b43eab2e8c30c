"""Keeps the processes of a pool alive: starts them, brings back those that die, ends them all.

Children end with this process even if it is killed: the kernel does it (PR_SET_PDEATHSIG), so no
orphan is left for a sweeper to find. Rule: no error, not even of a full disk, ends a keeper.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from potluck.core import parameters
from potluck.ports.clock import Clock
from potluck.ports.processes import Command, Process, Processes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """One process to keep. Ended in the reverse of the order in which they were given."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    pass_fds: Sequence[int] = ()
    grace_ms: int = parameters.child_grace_ms


@dataclass(slots=True)
class _Kept:
    child: Child
    process: Process | None = None
    started_ms: int = 0
    failures: int = 0
    starts: int = 0
    keeper: "asyncio.Task[None] | None" = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Supervisor:
    def __init__(
        self, processes: Processes, clock: Clock, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._processes = processes
        self._clock = clock
        self._on_change = on_change
        self._kept: dict[str, _Kept] = {}
        self._rotator: asyncio.Task[None] | None = None

    async def start(self, child: Child) -> None:
        """Raises `SpawnError` or `OSError` if it cannot be started at all."""
        kept = self._kept[child.name] = _Kept(child)
        await self._spawn(kept)
        loop = asyncio.get_running_loop()
        kept.keeper = loop.create_task(self._keep(kept))
        if self._rotator is None:
            self._rotator = loop.create_task(self._rotate_for_ever())

    def pids(self) -> dict[str, int]:
        """Of those that run now."""
        return {
            name: kept.process.pid
            for name, kept in self._kept.items()
            if kept.process is not None and kept.process.returncode is None
        }

    def restarts(self) -> dict[str, int]:
        return {name: kept.starts - 1 for name, kept in self._kept.items()}

    def failing(self) -> str | None:
        """The name of a child that cannot stay up, if there is one."""
        for name, kept in self._kept.items():
            if kept.failures >= parameters.child_failures_max:
                return name
        return None

    async def stop(self) -> None:
        """Returns when every child is gone."""
        await _cancelled(self._rotator)
        for kept in reversed(self._kept.values()):
            await _cancelled(kept.keeper)
            if kept.process is not None:
                await kept.process.stop(kept.child.grace_ms)
        self._tell()

    async def _spawn(self, kept: _Kept) -> None:
        child = kept.child
        kept.started_ms = self._clock.now_ms()
        rotate(child.log)
        command = Command(
            argv=child.argv,
            env=child.env,
            log=child.log,
            name=f"{child.name}-{os.getpid()}",
            pass_fds=child.pass_fds,
        )
        kept.ended.clear()
        kept.process = await self._processes.spawn(command, lambda _status: kept.ended.set())
        kept.starts += 1
        self._tell()

    async def _keep(self, kept: _Kept) -> None:
        while True:
            await kept.ended.wait()
            await self._bring_back(kept)

    async def _bring_back(self, kept: _Kept) -> None:
        lived_ms = self._clock.now_ms() - kept.started_ms
        settled = lived_ms >= parameters.child_settled_ms
        kept.failures = 1 if settled else kept.failures + 1
        wait_ms = back_off_ms(kept.failures)
        status = kept.process.returncode if kept.process is not None else None
        _log.warning("%s ended with status %s, back in %d ms", kept.child.name, status, wait_ms)
        self._tell()
        await self._clock.sleep_ms(wait_ms)
        try:
            await self._spawn(kept)
        except Exception:
            _log.exception("%s cannot be started", kept.child.name)
            kept.ended.set()

    def _tell(self) -> None:
        try:
            self._on_change()
        except Exception:
            # A full disk: the pool goes on, and the next change is written again.
            _log.exception("what changed was not written")

    async def _rotate_for_ever(self) -> None:
        while True:
            await self._clock.sleep_ms(parameters.child_log_check_ms)
            for kept in list(self._kept.values()):
                try:
                    rotate(kept.child.log)
                except OSError:
                    _log.exception("the log of %s grows", kept.child.name)


async def _cancelled(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def back_off_ms(failures: int) -> int:
    """Doubling from the first wait to the last."""
    wait_ms = parameters.child_back_off_first_ms << min(failures - 1, 16)
    return min(wait_ms, parameters.child_back_off_last_ms)


def rotate(log: Path) -> None:
    """One older log is kept, so that a pool that runs for years does not fill the disk.

    Copied and emptied, not renamed: its writer keeps the file open, and appends.
    """
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size <= parameters.child_log_bytes_max:
            return
        older = log.with_suffix(log.suffix + ".old")
        try:
            shutil.copy(log, older)
        except OSError:
            # No room for two: the newest words matter less than a disk that is not full.
            older.unlink(missing_ok=True)
        os.truncate(log, 0)
