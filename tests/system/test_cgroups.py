"""Where groups are looked for, on hosts we do not have here: trees and mount tables are files."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from potluck.adapters import cgroups
from potluck.adapters.processes import LocalProcesses
from potluck.ports.processes import Command, Limits, SpawnError
from tests.system import pools


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
    own = write(tmp_path / "own", f"0::/user.slice/potluck.service/{cgroups.named('self')}\n")
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
    monkeypatch.setattr(cgroups.parameters, "cgroup_removal_ms", 20)
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
        asyncio.run(processes.spawn(command))


def test_root_without_cgroups_cannot_promise_a_limit_on_processes(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("not root")
    command = Command(
        argv=["/bin/true"], env={}, log=tmp_path / "log", name="x", limits=Limits(pids=5)
    )
    with pytest.raises(SpawnError, match="root"):
        asyncio.run(LocalProcesses(use_cgroups=False).spawn(command))


def left_over_groups(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    """(of processes that are gone, others), made in a tree that looks like a hierarchy."""
    place = delegated(tmp_path).v2
    assert place is not None
    mine = cgroups.named("engine-1-abc")
    prefix, pid, start, namespace, rest = mine.split("-", 4)
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    names = [
        f"{prefix}-{gone.pid}-{start}-{namespace}-{rest}",
        # The pid was used again.
        f"{prefix}-{pid}-{int(start) - 1}-{namespace}-{rest}",
        f"{prefix}-{gone.pid}-{start}-{namespace}-self",
    ]
    others = [mine, f"{prefix}-{gone.pid}-{start}-1-{rest}", f"{prefix}-x-y", "user.slice"]
    for name in (*names, *others):
        (place / name).mkdir()
    return [place / name for name in names], [place / name for name in others]


def test_groups_whose_owner_is_gone_are_swept_whatever_their_age(tmp_path: Path) -> None:
    gone, others = left_over_groups(tmp_path)
    assert sorted(cgroups.sweep(tmp_path / "mountinfo")) == sorted(gone)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in others)


def test_what_lives_in_a_group_that_is_left_over_is_ended(tmp_path: Path) -> None:
    if not LocalProcesses().limits_available()[0]:
        pytest.skip("no cgroups")
    before = pools.cgroups()
    script = Path(__file__).with_name("orphan.py")
    owner = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "log")],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    orphan = psutil.Process(int(owner.stdout))
    assert pools.alive(orphan)
    assert pools.cgroups_left(before)
    cgroups.sweep()
    pools.until(lambda: not pools.alive(orphan), what="the orphan's end")
    assert not pools.cgroups_left(before)


def test_a_spawn_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    before = pools.cgroups()
    command = Command(
        argv=["/bin/sleep", "60"], env={}, log=tmp_path / "log", name="cancelled",
        limits=Limits(pids=5) if os.getuid() == 0 else Limits(),
    )  # fmt: skip

    async def body() -> None:
        processes = LocalProcesses()
        task = asyncio.get_running_loop().create_task(processes.spawn(command))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())
    assert not [one for one in psutil.Process().children() if one.name() == "sleep"]
    assert not (pools.cgroups() - before)


def test_the_loop_goes_on_while_a_program_is_started(tmp_path: Path) -> None:
    command = Command(argv=["/bin/true"], env={}, log=tmp_path / "log", name="slow")

    async def body() -> int:
        turns = 0
        task = asyncio.get_running_loop().create_task(LocalProcesses().spawn(command))
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        assert await (await task).wait() == 0
        return turns

    assert asyncio.run(body()) > 2
