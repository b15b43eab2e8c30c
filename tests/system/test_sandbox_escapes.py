"""Six ways out of the real sandbox, as root and as a plain user; each fails, and its control works.

Root drops to a high uid in cgroups; a plain user has no cgroups here and gets rlimits.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.adapters.processes import LocalProcesses
from potluck.agent.sandboxes import bubblewrap, seccomp, tier
from tests.system import box

ROOT = Path(__file__).parents[2]
PLAIN_UID = 65_534
SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))


def _missing() -> str:
    try:
        bubblewrap.find()
        seccomp.check()
    except (bubblewrap.SandboxError, seccomp.SeccompError) as error:
        return str(error)
    return "" if Path(box.PYTHON).exists() else f"no {box.PYTHON}"


pytestmark = pytest.mark.skipif(bool(_missing()), reason=_missing() or "complete")


class Inside:
    """Runs probes in the sandbox as one user."""

    def __init__(self, user: str, folder: Path) -> None:
        self.user = user
        self.folder = folder
        self.identity = {"user": PLAIN_UID, "group": PLAIN_UID, "extra_groups": []}
        self.count = 0

    def command(self, probe: str, argument: str) -> list[str]:
        self.count += 1
        place = self.folder / str(self.count)
        place.mkdir()
        if self.user == "plain":
            os.chown(place, PLAIN_UID, PLAIN_UID)
        cgroups = [] if self.user == "root" else ["--no-cgroups"]
        python = sys.executable if self.user != "plain" else box.PYTHON
        return [python, "-m", "tests.system.box", str(place), probe, argument, *cgroups]

    def keywords(self) -> dict:
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}:{SITE}",
               "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        return {"cwd": "/", "env": env, **(self.identity if self.user == "plain" else {})}

    def run(self, probe: str, argument: str = "") -> dict:
        done = subprocess.run(
            self.command(probe, argument), capture_output=True, text=True, timeout=100,
            check=False, **self.keywords(),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def facts(self, probe: str, argument: str = "") -> dict:
        found = self.run(probe, argument)
        assert found["tier"] == ("full" if self.user == "root" else "limited")
        facts = box.facts(found["log"])
        assert facts, found
        return facts


def _plain_can_run() -> bool:
    """The plain user needs an interpreter and our packages; a root-only tree hides them."""
    version = subprocess.run(
        [box.PYTHON, "-c", "import sys; print(*sys.version_info[:2])"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return version == [str(one) for one in sys.version_info[:2]] and bool(
        ROOT.stat().st_mode & 0o001
    )


USERS = ["root", "plain"] if os.getuid() == 0 else ["own"]


@pytest.fixture(params=USERS)
def inside(request: pytest.FixtureRequest) -> Iterator[Inside]:
    if request.param == "plain" and not _plain_can_run():
        pytest.skip("no interpreter for a plain user")
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Inside(request.param, Path(folder))


def test_the_host_files_are_out_of_reach(inside: Inside, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o777)
        secret = Path(folder) / "secret"
        secret.write_text("x")
        secret.chmod(0o666)
        control = box.outside("host_file", str(secret))
        assert control["read"] is True
        assert control["write"] is True
        assert control["passwd"] is True
        Path(f"{secret}.written").unlink()
        facts = inside.facts("host_file", str(secret))
        assert not any(value is True for value in facts.values()), facts
        assert not Path(f"{secret}.written").exists()


def test_the_network_is_out_of_reach(inside: Inside) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        control = box.outside("network", port)
        assert control == {"connect": True, "netlink": True}
        facts = inside.facts("network", port)
        assert facts["connect"] is not True
        assert facts["netlink"] == "Address family not supported by protocol"


def test_other_processes_are_out_of_reach(inside: Inside) -> None:
    victim = subprocess.Popen(
        ["sleep", "60"], **(inside.identity if inside.user == "plain" else {})
    )
    try:
        facts = inside.facts("other_process", str(victim.pid))
        assert facts["visible"] is False
        assert facts["killed"] is not True
        assert facts["pids"] <= 3
        assert victim.poll() is None
        control = box.outside("other_process", str(victim.pid))
        assert control["visible"] is True
        assert control["killed"] is True
        assert victim.wait(10) == -signal.SIGKILL
    finally:
        victim.kill()
        victim.wait()


def test_kernel_keyrings_and_namespaces_are_out_of_reach(inside: Inside) -> None:
    control = box.outside("keyctl", "")
    facts = inside.facts("keyctl")
    assert facts == {"added": False, "errno": 1}
    assert control["added"] is True
    assert box.outside("namespaces", "")["unshared"] is True
    assert inside.facts("namespaces") == {"unshared": False, "errno": 1}


def test_a_fork_bomb_is_bounded(inside: Inside) -> None:
    control = box.outside("forks", "200")
    assert control == {"forked": 200, "refused": None}
    facts = inside.facts("forks", "200")
    assert facts["refused"] == "Resource temporarily unavailable"
    assert 1 <= facts["forked"] <= box.PIDS


def test_memory_is_bounded(inside: Inside) -> None:
    control = box.outside("memory", str(4 * box.MEMORY_MIB))
    assert control == {"mib": 4 * box.MEMORY_MIB, "refused": False}
    found = inside.run("memory", str(4 * box.MEMORY_MIB))
    facts = box.facts(found["log"])
    if found["tier"] == "full":
        assert facts == {}
        assert found["status"] != 0
    else:
        assert facts["refused"] is True
        assert facts["mib"] <= box.MEMORY_MIB


def test_it_dies_with_its_parent(inside: Inside) -> None:
    parent = subprocess.Popen(
        inside.command("hang", ""), stdout=subprocess.PIPE, text=True, **inside.keywords()
    )
    assert parent.stdout is not None
    pid = json.loads(parent.stdout.readline())["pid"]
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(500):
        if _gone(pid):
            return
        time.sleep(0.02)
    pytest.fail("the sandbox outlived its parent")


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_uid_is_never_roots(inside: Inside) -> None:
    assert inside.facts("limits")["uid"] == bubblewrap.INSIDE_UID
    if os.getuid() == 0:
        uid = bubblewrap.unprivileged_uid("probe")
        assert uid is not None
        assert uid > 0


def test_the_sandbox_is_proved_by_running_it() -> None:
    async def body() -> None:
        processes = LocalProcesses()
        assert await tier.prove(processes, "node_1") == tier.probe(processes)

    asyncio.run(body())


def test_a_sandbox_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "_isolation", lambda: ["--no-such-option"])

    async def body() -> None:
        found, reason = await tier.prove(LocalProcesses(), "node_1")
        assert found == "none"
        assert "no-such-option" in reason

    asyncio.run(body())


def test_a_file_it_writes_is_bounded(inside: Inside) -> None:
    control = box.outside("fill", "9")
    assert control == {"mib": 9, "refused": None}
    assert inside.facts("fill", "9") == {"mib": box.FILE_MIB, "refused": "File too large"}
