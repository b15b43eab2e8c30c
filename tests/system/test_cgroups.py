"""Where groups are looked for, on hosts we do not have here: trees and mount tables are files."""

import os
from pathlib import Path

import pytest

from potluck.adapters import cgroups
from potluck.adapters.processes import LocalProcesses
from potluck.ports.processes import Command, Limits, SpawnError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def mounts(tmp_path: Path, *lines: str) -> Path:
    return write(tmp_path / "mountinfo", "".join(line + "\n" for line in lines))


def v1(tmp_path: Path, controllers: str, root: str = "/") -> str:
    point = tmp_path / controllers
    return f"30 29 0:26 {root} {point} rw,relatime - cgroup cgroup rw,{controllers}"


def v2(tmp_path: Path) -> str:
    return f"41 31 0:38 / {tmp_path / 'unified'} rw,relatime shared:9 - cgroup2 cgroup2 rw"


def test_v1_with_shared_mounts_and_a_containers_root(tmp_path: Path) -> None:
    table = mounts(
        tmp_path, v1(tmp_path, "cpu,cpuacct"), v1(tmp_path, "memory", "/docker/x"),
        v1(tmp_path, "pids"),
    )  # fmt: skip
    own = write(tmp_path / "own", "4:memory:/docker/x/y\n3:cpu,cpuacct:/a\n2:pids:/\n1:name=z:/\n")
    layout = cgroups.find(table, own)
    assert layout.v1 == {
        "memory": tmp_path / "memory" / "y",
        "cpu": tmp_path / "cpu,cpuacct" / "a",
        "pids": tmp_path / "pids",
    }
    assert layout.complete
    assert layout.v2 is None


def test_hybrid_uses_v1_for_limits_and_v2_for_its_kill(tmp_path: Path) -> None:
    lines = [v1(tmp_path, name) for name in ("memory", "pids", "cpu")]
    own = write(tmp_path / "own", "4:memory:/\n3:cpu:/\n2:pids:/\n0::/\n")
    write(tmp_path / "unified" / "cgroup.controllers", "hugetlb\n")
    layout = cgroups.find(mounts(tmp_path, *lines, v2(tmp_path)), own)
    assert (layout.complete, layout.v2_limits) == (True, False)
    group = cgroups.Group(layout, "x")
    assert [path.parent.name for path in group.folders] == ["memory", "pids", "cpu", "unified"]


def delegated(tmp_path: Path) -> cgroups.Layout:
    own = write(tmp_path / "own", "0::/user.slice/potluck.service\n")
    place = tmp_path / "unified" / "user.slice" / "potluck.service"
    write(place / "cgroup.controllers", "cpu memory pids\n")
    write(place / "cgroup.subtree_control", "cpu memory pids\n")
    return cgroups.find(mounts(tmp_path, v2(tmp_path)), own)


def test_v2_where_it_is_delegated(tmp_path: Path) -> None:
    layout = delegated(tmp_path)
    assert layout.v2_limits
    group = cgroups.Group(layout, "x")
    group.create(Limits(memory_bytes=10_000_000, pids=7, cpu_cores=1.5))
    (folder,) = group.folders
    assert (folder / "memory.max").read_text() == str(10_000_000 // 4096 * 4096)
    assert (folder / "memory.swap.max").read_text() == "0"
    assert (folder / "pids.max").read_text() == "7"
    assert (folder / "cpu.max").read_text() == "150000 100000"
    assert group.entrances() == [str(folder / "cgroup.procs")]


def test_v2_after_stepping_aside_into_a_leaf(tmp_path: Path) -> None:
    delegated(tmp_path)
    own = write(tmp_path / "own", f"0::/user.slice/potluck.service/{cgroups.AGENT_LEAF}\n")
    layout = cgroups.find(tmp_path / "mountinfo", own)
    assert layout.v2 == tmp_path / "unified" / "user.slice" / "potluck.service"


def test_v2_that_is_not_ours_is_no_limit(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "0::/session\n")
    write(tmp_path / "unified" / "session" / "cgroup.controllers", "memory pids\n")
    layout = cgroups.find(mounts(tmp_path, v2(tmp_path)), own)
    assert not layout.complete


def test_a_limit_that_the_kernel_ignores_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "_REMOVAL_TRIES", 1)
    layout = delegated(tmp_path)
    group = cgroups.Group(layout, "x")
    group.folders[0].mkdir()
    os.symlink("/dev/null", group.folders[0] / "pids.max")
    with pytest.raises(SpawnError, match="was set to 7 and reads"):
        group.create(Limits(pids=7))


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    processes = LocalProcesses()
    command = Command(argv=["/no/such"], env={}, log=tmp_path / "log", name="none",
                      limits=Limits(pids=5) if os.getuid() == 0 else Limits())  # fmt: skip
    with pytest.raises(SpawnError, match="No such file"):
        processes.spawn(command)


def test_root_without_cgroups_cannot_promise_a_limit_on_processes(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("not root")
    command = Command(
        argv=["/bin/true"], env={}, log=tmp_path / "log", name="x", limits=Limits(pids=5)
    )
    with pytest.raises(SpawnError, match="root"):
        LocalProcesses(use_cgroups=False).spawn(command)
