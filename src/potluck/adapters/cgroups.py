"""Control groups without systemd: v2 where it is delegated, else v1, else a reason.

Rule: a limit counts only after it was read back; a kernel that ignores one says nothing. A group's
name tells its owner (pid, start, pid namespace), so whoever finds one knows if it is left over.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from potluck.core import parameters
from potluck.ports.processes import Limits, SpawnError

PREFIX: Final = "potluck-"
_LEAF: Final = "self"
CONTROLLERS: Final = ("memory", "pids", "cpu")
CPU_PERIOD_US: Final = 100_000
_REMOVAL_PAUSE_S: Final = 0.02
_NAME: Final = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-(\d+)-(.+)")
"""Owner's pid, its start in ticks since boot, its pid namespace, and what the group is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Under which folders groups can be made. `v2` may be there for `cgroup.kill` alone."""

    v1: dict[str, Path]
    v2: Path | None
    v2_limits: bool

    @property
    def complete(self) -> bool:
        return self.v2_limits or all(name in self.v1 for name in CONTROLLERS)


class Group:
    """One child's cgroups: made, limited, entered by the child before it execs, removed."""

    def __init__(self, layout: Layout, name: str) -> None:
        self._layout = layout
        self.folders = [path / named(name) for path in _distinct(layout)]

    def create(self, limits: Limits) -> None:
        """Raises `SpawnError` if a limit cannot be set; then nothing is left behind."""
        try:
            for folder in self.folders:
                folder.mkdir(exist_ok=True)
            for path, wanted in self._settings(limits):
                path.write_text(wanted)
                _verify(path, wanted)
            self._forbid_swap()
        except OSError as error:
            self.remove()
            raise SpawnError(f"a limit could not be set: {error}") from error
        except SpawnError:
            self.remove()
            raise

    def _settings(self, limits: Limits) -> Iterator[tuple[Path, str]]:
        """In this order: a group's memory limit must stand before anything lives in it."""
        if limits.memory_bytes is not None:
            yield (
                self._file("memory", "memory.limit_in_bytes", "memory.max"),
                str(limits.memory_bytes // 4096 * 4096),
            )
        if limits.pids is not None:
            yield self._file("pids", "pids.max", "pids.max"), str(limits.pids)
        if limits.cpu_cores is not None:
            quota_us = round(limits.cpu_cores * CPU_PERIOD_US)
            if self._layout.v2_limits:
                yield self._file("cpu", "", "cpu.max"), f"{quota_us} {CPU_PERIOD_US}"
            else:
                yield self._file("cpu", "cpu.cfs_period_us", ""), str(CPU_PERIOD_US)
                yield self._file("cpu", "cpu.cfs_quota_us", ""), str(quota_us)

    def _file(self, controller: str, v1_name: str, v2_name: str) -> Path:
        if self._layout.v2_limits:
            return self._v2_folder() / v2_name
        if controller not in self._layout.v1:
            raise SpawnError(f"this machine has no cgroup controller {controller}")
        return self._layout.v1[controller] / self.folders[0].name / v1_name

    def _forbid_swap(self) -> None:
        """Swap would let a group grow past its memory. Not every kernel counts it."""
        if self._layout.v2_limits:
            path, wanted = self._v2_folder() / "memory.swap.max", "0"
        else:
            folder = self._layout.v1["memory"] / self.folders[0].name
            path = folder / "memory.memsw.limit_in_bytes"
            wanted = (folder / "memory.limit_in_bytes").read_text()
        with contextlib.suppress(OSError):
            path.write_text(wanted)

    def _v2_folder(self) -> Path:
        assert self._layout.v2 is not None
        return self._layout.v2 / self.folders[0].name

    def entrances(self) -> list[str]:
        """Files into which the child writes itself before it execs."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def kill(self) -> None:
        """SIGKILL to all members. Without `cgroup.kill` (before Linux 5.14) until none is left."""
        if self._layout.v2 is not None:
            with contextlib.suppress(OSError):
                (self._v2_folder() / "cgroup.kill").write_text("1")
                return
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def _members(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.folders[0] / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def remove(self) -> bool:
        """Kills what is left and removes the folders; may take a moment, so not on the loop."""
        for _ in range(round(parameters.cgroup_removal_ms / 1_000 / _REMOVAL_PAUSE_S)):
            if self._removed():
                return True
            self.kill()
            time.sleep(_REMOVAL_PAUSE_S)
        return False

    def _removed(self) -> bool:
        for folder in self.folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return True


def named(purpose: str) -> str:
    """The name of a group of this process."""
    return f"{PREFIX}{os.getpid()}-{_started(os.getpid())}-{_pid_namespace()}-{purpose}"


def _started(pid: int) -> int | None:
    """Ticks between the boot and this process's start: proc(5), stat, field 22. None: it is gone,
    or a zombie, which owns nothing any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _distinct(layout: Layout) -> list[Path]:
    """Folders to make a group in; two v1 controllers may share a mount (`cpu,cpuacct`)."""
    paths = (
        [] if layout.v2_limits else [layout.v1[name] for name in CONTROLLERS if name in layout.v1]
    )
    if layout.v2 is not None:
        paths.append(layout.v2)
    return list(dict.fromkeys(paths))


def _verify(path: Path, wanted: str) -> None:
    found = path.read_text().strip()
    if found != wanted:
        raise SpawnError(f"{path.name} was set to {wanted} and reads {found}")


def find(mountinfo: Path = Path("/proc/self/mountinfo"),
         own: Path = Path("/proc/self/cgroup")) -> Layout:  # fmt: skip
    """This process's own place in each hierarchy."""
    places = _own_places(own)
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for mount, root, kind, options in _mounts(mountinfo):
        if kind == "cgroup2" and "" in places:
            v2 = _inside(mount, root, places[""])
        elif kind == "cgroup":
            for name in CONTROLLERS:
                if name in options and name in places:
                    v1[name] = _inside(mount, root, places[name])
    if v2 is not None and (leaf := _NAME.fullmatch(v2.name)) and leaf[4] == _LEAF:
        v2 = v2.parent
    return Layout(v1=v1, v2=v2, v2_limits=v2 is not None and _delegated(v2))


def _own_places(path: Path) -> dict[str, str]:
    """Controller to path; the v2 hierarchy has no name."""
    places = {}
    for line in path.read_text().splitlines():
        _, names, place = line.split(":", 2)
        for name in names.split(","):
            places[name] = place
    return places


def _mounts(path: Path) -> Iterator[tuple[Path, str, str, list[str]]]:
    """(mount point, root within the hierarchy, kind, options): proc(5), mountinfo."""
    for line in path.read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        yield Path(fields[4]), fields[3], kind, options.split(",")


def _inside(mount: Path, root: str, place: str) -> Path:
    """In a container the mount shows a part of the hierarchy, and paths may name the whole."""
    if root != "/" and place.startswith(root):
        place = place[len(root) :]
    return mount / place.lstrip("/")


def _delegated(folder: Path) -> bool:
    """Whether all controllers can be handed down here, after stepping aside into a leaf.

    v2 forbids a group both processes and controlled children (its "no internal processes" rule).
    """
    try:
        if not set(CONTROLLERS) <= set((folder / "cgroup.controllers").read_text().split()):
            return False
        if _hand_down(folder):
            return True
        leaf = folder / named(_LEAF)
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        return _hand_down(folder)
    except OSError:
        return False


def _hand_down(folder: Path) -> bool:
    control = folder / "cgroup.subtree_control"
    if set(CONTROLLERS) <= set(control.read_text().split()):
        return True
    with contextlib.suppress(OSError):
        control.write_text("+memory +pids +cpu")
    return set(CONTROLLERS) <= set(control.read_text().split())


def sweep(mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Path]:
    """Removes the groups whose owner is gone, wherever they lie, with all that lives in them.

    Looked for in whole hierarchies: the owner may have been started in another session's group.
    """
    removed = []
    for folder in left_over(mountinfo):
        if _swept(folder):
            removed.append(folder)
    return removed


def left_over(mountinfo: Path = Path("/proc/self/mountinfo")) -> Iterator[Path]:
    namespace = str(_pid_namespace())
    for mount, _, kind, options in _mounts(mountinfo):
        if kind == "cgroup2" or (kind == "cgroup" and not set(CONTROLLERS).isdisjoint(options)):
            for folder, inner, _ in os.walk(mount):
                for name in inner:
                    found = _NAME.fullmatch(name)
                    if found and found[3] == namespace and _started(int(found[1])) != int(found[2]):
                        yield Path(folder, name)


def _swept(folder: Path) -> bool:
    for _ in range(round(parameters.cgroup_removal_ms / 1_000 / _REMOVAL_PAUSE_S)):
        try:
            folder.rmdir()
        except FileNotFoundError:
            return True
        except PermissionError:
            return False
        except OSError:
            _kill_members(folder)
            time.sleep(_REMOVAL_PAUSE_S)
        else:
            return True
    return False


def _kill_members(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            # 0 stands for one of a pid namespace that cannot be seen from here.
            if int(pid) > 0:
                os.kill(int(pid), signal.SIGKILL)
