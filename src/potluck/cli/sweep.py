"""Removes what a dead `up` left behind: processes, cgroups, sockets and credentials.

Only what its state file names is touched, and a process only if it still is the one that was named:
pids are used again. Control groups tell their owner by their name.
"""

import contextlib
import shutil

import msgspec
import psutil

from potluck.adapters import cgroups
from potluck.cli.folder import DataFolder

_START_TOLERANCE_S = 1.0


class ProcessMark(msgspec.Struct):
    pid: int
    started_s: float
    """Seconds since 1970, as the kernel tells."""


class StateFile(msgspec.Struct, kw_only=True):
    """`<data>/run/supervisor.json`, written at every change."""

    url: str
    nodes: int
    supervisor: ProcessMark
    children: dict[str, ProcessMark]
    restarts: dict[str, int]


def mark(pid: int) -> ProcessMark | None:
    with contextlib.suppress(psutil.NoSuchProcess):
        return ProcessMark(pid=pid, started_s=psutil.Process(pid).create_time())
    return None


def find(marked: ProcessMark) -> psutil.Process | None:
    """The living process that was marked, if it is still the same one."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(marked.pid)
        same = abs(process.create_time() - marked.started_s) < _START_TOLERANCE_S
        if same and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None


def read_state(folder: DataFolder) -> StateFile | None:
    """None: there is none, or none that can be read as one. Raises `OSError`."""
    with contextlib.suppress(FileNotFoundError, msgspec.MsgspecError):
        return msgspec.json.decode(folder.state.read_bytes(), type=StateFile)
    return None


def sweep(folder: DataFolder) -> list[str]:
    """What was removed, in words. The caller holds the folder's lock."""
    swept = []
    state = read_state(folder)
    if state is not None:
        for name, marked in state.children.items():
            process = find(marked)
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                    process.wait(timeout=5)
                swept.append(f"process {name} ({marked.pid})")
    if state is not None:
        swept.append(str(folder.run))
    clear(folder)
    swept += [f"control group {path.name}" for path in cgroups.sweep()]
    return swept


def clear(folder: DataFolder) -> None:
    """The run folder, with its sockets and credentials."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder.run)
