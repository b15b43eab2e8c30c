"""Child processes that end with their parent, inside cgroups where there are any.

Rule: the death signal follows the *thread* that forked, so all children are forked by one thread
that lives as long as this process.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

import psutil

from potluck.adapters import cgroups
from potluck.core import parameters
from potluck.ports.processes import STAGE, Command, Limits, SpawnError

_LAUNCHER: Final = Path(__file__).with_name("launch.py")
_spawner: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")
"""Of the module, not of an object: children must not die because an object was forgotten."""
_PROBE: Final = Limits(memory_bytes=64 * 1024 * 1024, pids=16, cpu_cores=0.5)


class LocalProcess:
    def __init__(
        self, popen: "subprocess.Popen[bytes]", group: cgroups.Group | None,
        on_exit: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        self._popen = popen
        self._group = group
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._pidfd = os.pidfd_open(popen.pid)
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        return self._popen.returncode

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    async def stop(self, grace_ms: int) -> None:
        family = _descendants(self._popen.pid) if self._group is None else []
        if not self._ended.done():
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_ms / 1000):
                    await self.wait()
        if not self._ended.done():
            if self._group is not None:
                self._group.kill()
            self._signal(signal.SIGKILL)
            await self.wait()
        if self._group is not None:
            await asyncio.to_thread(self._group.remove)
        elif family:
            # The kernel ends a sandbox's namespace with its init, but not in the same moment.
            await asyncio.to_thread(
                psutil.wait_procs, family, timeout=parameters.process_end_wait_ms / 1000
            )

    def _signal(self, number: int) -> None:
        """To its whole process group: it was started as the leader of one."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, number)

    def _reap(self) -> None:
        status = self._popen.poll()
        if status is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        # Its descendants do not outlive it; without a cgroup only its process group is known.
        if self._group is not None:
            self._group.kill()
        else:
            self._signal(signal.SIGKILL)
        if not self._ended.done():
            self._ended.set_result(status)
        if self._on_exit is not None:
            self._on_exit(status)


class LocalProcesses:
    """`ports.processes.Processes` on this machine. `spawn` needs a running loop."""

    def __init__(self, *, use_cgroups: bool = True) -> None:
        """Without cgroups only resource limits are used, as where a plain user has none."""
        self._layout: cgroups.Layout | None = None
        self._reason = "cgroups are switched off"
        if use_cgroups:
            self._layout, self._reason = _usable_layout()

    def limits_available(self) -> tuple[bool, str]:
        return self._layout is not None, self._reason

    async def spawn(
        self, command: Command, on_exit: Callable[[int], None] | None = None
    ) -> LocalProcess:
        starting = asyncio.get_running_loop().run_in_executor(_spawner, self._start, command)
        cancelled = await _ended(starting)
        popen, group = starting.result()
        process = LocalProcess(popen, group, on_exit)
        if cancelled:
            # Nobody holds it: it must not outlive this call.
            await process.stop(0)
            raise asyncio.CancelledError
        return process

    def _start(self, command: Command) -> "tuple[subprocess.Popen[bytes], cgroups.Group | None]":
        """On the spawner thread: a program takes a while to be exec'ed, a group to be removed."""
        group = self._group(command)
        rlimits = [("RLIMIT_CORE", 0)]
        if command.limits.file_bytes is not None:
            rlimits.append(("RLIMIT_FSIZE", command.limits.file_bytes))
        try:
            if group is None:
                rlimits += _rlimits(command)
            return _launch(command, group, rlimits), group
        except (OSError, SpawnError) as error:
            if group is not None:
                group.remove()
            raise SpawnError(str(error)) from error

    def _group(self, command: Command) -> cgroups.Group | None:
        if self._layout is None or command.limits == Limits():
            return None
        group = cgroups.Group(self._layout, command.name)
        group.create(command.limits)
        return group


async def _ended(work: "asyncio.Future[Any]") -> bool:
    """Waits until it is done, come what may; whether somebody wanted to cancel it meanwhile."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _usable_layout() -> tuple[cgroups.Layout | None, str]:
    """Found by trying: a group is made, limited, read back and removed."""
    try:
        layout = cgroups.find()
    except OSError as error:
        return None, f"no cgroups are visible: {error}"
    if not layout.complete:
        return None, "no memory, pids and cpu controllers are delegated to this user"
    cgroups.sweep()
    group = cgroups.Group(layout, "probe")
    try:
        group.create(_PROBE)
    except SpawnError as error:
        if isinstance(error.__cause__, PermissionError):
            return None, "this user may not make control groups"
        return None, str(error)
    group.remove()
    return layout, "cgroup v2" if layout.v2_limits else "cgroup v1"


def _rlimits(command: Command) -> list[tuple[str, int]]:
    """Weaker than cgroups. Not the address space: a mapped model file would count.

    RLIMIT_DATA bounds each process alone. RLIMIT_NPROC counts all threads of the user, so those
    that run already are added.
    """
    limits: list[tuple[str, int]] = []
    uid = command.drop_to_uid if command.drop_to_uid is not None else os.getuid()
    if command.limits.memory_bytes is not None:
        limits.append(("RLIMIT_DATA", command.limits.memory_bytes))
    if command.limits.pids is not None:
        if uid == 0:
            raise SpawnError("the number of root's processes cannot be limited without cgroups")
        limits.append(("RLIMIT_NPROC", _threads_of(uid) + command.limits.pids))
    return limits


def _threads_of(uid: int) -> int:
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry.name}/task"))
    return count


def _private_log(path: Path) -> IO[bytes]:
    """For its owner alone, whatever the umask: it may quote what an engine was asked."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o600), "ab")


def _launch(
    command: Command, group: cgroups.Group | None, rlimits: list[tuple[str, int]]
) -> "subprocess.Popen[bytes]":
    """On the spawner thread. Returns once the program itself has been exec'ed."""
    reading, writing = os.pipe()
    order = {
        "argv": list(command.argv),
        "entrances": group.entrances() if group is not None else [],
        "rlimits": rlimits,
        "stage": STAGE,
        "staged": [(str(source), name) for source, name in command.staged],
        "uid": command.drop_to_uid,
        "parent": os.getpid(),
        "report_fd": writing,
    }
    try:
        with _private_log(command.log) as log:
            popen = subprocess.Popen(
                [os.path.realpath(sys.executable), "-I", "-S", str(_LAUNCHER), json.dumps(order)],
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(*command.pass_fds, writing),
                start_new_session=True,
            )
    finally:
        os.close(writing)
        if "popen" not in locals():
            os.close(reading)
    with os.fdopen(reading, "rb") as report:
        failure = report.read()
    if failure:
        popen.wait()
        raise SpawnError(failure.decode(errors="replace"))
    return popen
