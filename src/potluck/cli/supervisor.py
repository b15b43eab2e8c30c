"""Keeps the processes of a pool alive: starts them, brings back those that die, ends them all.

Children end with this process even if it is killed: the kernel does it (PR_SET_PDEATHSIG), so no
orphan is left for a sweeper to find.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from potluck.core import parameters
from potluck.ports.clock import Clock
from potluck.ports.processes import Command, Process, Processes, SpawnError

_log = logging.getLogger(__name__)
_LOG_BYTES_MAX: Final = 16 * 1024 * 1024


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

    def start(self, child: Child) -> None:
        """Raises `SpawnError` if it cannot be started at all."""
        kept = self._kept[child.name] = _Kept(child)
        self._spawn(kept)
        kept.keeper = asyncio.get_running_loop().create_task(self._keep(kept))

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
        for kept in reversed(self._kept.values()):
            if kept.keeper is not None:
                kept.keeper.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await kept.keeper
            if kept.process is not None:
                await kept.process.stop(kept.child.grace_ms)
        self._on_change()

    def _spawn(self, kept: _Kept) -> None:
        child = kept.child
        _rotate(child.log)
        command = Command(
            argv=child.argv,
            env=child.env,
            log=child.log,
            name=f"{child.name}-{os.getpid()}",
            pass_fds=child.pass_fds,
        )
        kept.ended.clear()
        kept.process = self._processes.spawn(command, lambda _status: kept.ended.set())
        kept.started_ms = self._clock.now_ms()
        kept.starts += 1
        self._on_change()

    async def _keep(self, kept: _Kept) -> None:
        while True:
            await kept.ended.wait()
            assert kept.process is not None
            lived_ms = self._clock.now_ms() - kept.started_ms
            settled = lived_ms >= parameters.child_settled_ms
            kept.failures = 1 if settled else kept.failures + 1
            wait_ms = back_off_ms(kept.failures)
            _log.warning(
                "%s ended with status %s, back in %d ms",
                kept.child.name,
                kept.process.returncode,
                wait_ms,
            )
            self._on_change()
            await self._clock.sleep_ms(wait_ms)
            try:
                self._spawn(kept)
            except SpawnError:
                _log.exception("%s cannot be started", kept.child.name)
                kept.ended.set()


def back_off_ms(failures: int) -> int:
    """Doubling from the first wait to the last."""
    wait_ms = parameters.child_back_off_first_ms << min(failures - 1, 16)
    return min(wait_ms, parameters.child_back_off_last_ms)


def _rotate(log: Path) -> None:
    """One older log is kept, so that a pool that runs for years does not fill the disk."""
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES_MAX:
            log.replace(log.with_suffix(log.suffix + ".old"))
