"""A pool as people start it: `potluck up` as a process, looked at from outside."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

POTLUCK = Path(sys.executable).with_name("potluck")
TINY = Path(__file__).parents[1] / "data" / "tiny-q8_0.gguf"
START_S = 60.0
END_S = 40.0


class RunningPool:
    """Made by `start`."""

    def __init__(self, process: "subprocess.Popen[str]", announced: dict[str, Any]) -> None:
        self.process = process
        self.url: str = announced["url"]
        self.api_key: str = announced["api_key"]
        self.account: str = announced["account"]
        self.data_dir = Path(announced["data_dir"])
        self.announced = announced
        self.http = httpx.Client(
            base_url=self.url, headers={"authorization": f"Bearer {self.api_key}"}, timeout=60
        )

    def pids(self) -> dict[str, int]:
        """Of all children that run now."""
        state = json.loads((self.data_dir / "run" / "supervisor.json").read_text())
        return {name: int(child["pid"]) for name, child in state["children"].items()}

    def pid(self, name: str) -> int:
        return self.pids()[name]

    def children(self) -> list[str]:
        return sorted(self.pids())

    def descendants(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def get(self, path: str) -> Any:
        answer = self.http.get(f"/api/v1{path}")
        answer.raise_for_status()
        return answer.json()

    def cli(self, *arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [POTLUCK, *arguments, "--data-dir", self.data_dir],
            capture_output=True, text=True, check=check, timeout=60,
        )  # fmt: skip

    def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.http.get("/readyz").status_code == 200
        return False

    def stop(self, number: int = signal.SIGINT) -> int:
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        status = self.process.wait(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return status


def command(data_dir: Path, *options: str, launcher: Sequence[str] = (str(POTLUCK),)) -> list[str]:
    return [*launcher, "up", "--json", "--data-dir", str(data_dir), "--port", "0", *options]


def start(
    data_dir: Path,
    *options: str,
    model: Path | None = TINY,
    launcher: Sequence[str] = (str(POTLUCK),),
    **rest: Any,
) -> RunningPool:
    """Returns once a request would succeed."""
    chosen = ["--model", str(model)] if model is not None else []
    process = subprocess.Popen(
        command(data_dir, *chosen, *options, launcher=launcher), stdout=subprocess.PIPE, text=True,
        start_new_session=True, **rest,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"`up` ended with {process.wait(END_S)}: {logs(data_dir)}"
    announced = json.loads(line)
    assert "error" not in announced, announced
    return RunningPool(process, announced)


@contextlib.contextmanager
def running(data_dir: Path, *options: str, **rest: Any) -> Iterator[RunningPool]:
    """The pool; afterwards nothing of it is left."""
    groups = cgroups()
    pool = start(data_dir, *options, **rest)
    family = pool.descendants()
    try:
        yield pool
    finally:
        family += pool.descendants()
        pool.stop()
        left = [one for one in family if alive(one)]
        assert not left, f"left behind: {left}"
        assert not cgroups_left(groups)


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def until(condition: Callable[[], Any], timeout_s: float = 30.0, what: str = "it") -> Any:
    """The condition's value once it is true. Generous: machines may be slow, but not for ever."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"{what} did not come true in {timeout_s} s"
        time.sleep(0.05)


def logs(data_dir: Path) -> str:
    parts = []
    for path in sorted((data_dir / "logs").glob("*.log")):
        parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}")
    return "\n".join(parts)


def cgroups() -> set[Path]:
    """All control groups of this machine that Potluck made, whoever runs it."""
    return {
        Path(folder, name)
        for folder, inner, _ in os.walk("/sys/fs/cgroup")
        for name in inner
        if name.startswith("potluck-")
    }


def cgroups_left(before: set[Path]) -> set[Path]:
    """Those that came since, less those of other pools that run on this machine now."""
    return {one for one in cgroups() - before if not _owner_lives(one)}


def _owner_lives(group: Path) -> bool:
    """By the name: potluck-PID-START IN TICKS-NAMESPACE-purpose."""
    _, pid, start, _ = group.name.split("-", 3)
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return stat[0] != "Z" and stat[19] == start
