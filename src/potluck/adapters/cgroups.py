"""Control groups without systemd: v2 where it is delegated, else v1, else a reason.

Rule: a limit counts only after it was read back; a kernel that ignores one says nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from potluck.ports.processes import Limits, SpawnError

PREFIX: Final = "potluck-"
AGENT_LEAF: Final = "potluck-self"
CONTROLLERS: Final = ("memory", "pids", "cpu")
CPU_PERIOD_US: Final = 100_000
STALE_AFTER_S: Final = 60
_REMOVAL_TRIES: Final = 100
_REMOVAL_PAUSE_S: Final = 0.02


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
        self.folders = [path / (PREFIX + name) for path in _distinct(layout)]

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
                os.kill(pid, 9)

    def _members(self) -> list[int]:
        try:
            return [int(pid) for pid in (self.folders[0] / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def remove(self) -> bool:
        """Kills what is left and removes the folders; may take a moment, so not on the loop."""
        for _ in range(_REMOVAL_TRIES):
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
    if v2 is not None and v2.name == AGENT_LEAF:
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
        leaf = folder / AGENT_LEAF
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


def sweep(layout: Layout, now_s: float) -> None:
    """Remove the empty groups that a killed agent left behind; young ones may be in the making."""
    for parent in _distinct(layout):
        for folder in parent.glob(PREFIX + "*"):
            with contextlib.suppress(OSError):
                if folder.name != AGENT_LEAF and now_s - folder.stat().st_mtime > STALE_AFTER_S:
                    folder.rmdir()
