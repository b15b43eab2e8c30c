"""`potluck up` and `down`: what is left, what goes on, what is refused."""

import contextlib
import json
import os
import shutil
import signal
import site
import socket
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.system import pools
from tests.system.pools import POTLUCK, RunningPool

NOBODY = 65_534


def ask(pool: RunningPool, tokens: int = 8) -> dict:
    body = {
        "model": "tiny-q8_0",
        "messages": [{"role": "user", "content": "Tell me about the sea."}],
        "max_tokens": tokens,
    }
    answer = pool.http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return answer.json() | {"receipt": answer.headers["x-potluck-receipt"]}


def settled(pool: RunningPool, receipt: str) -> dict:
    return pools.until(
        lambda: (
            pool.http.get(f"/api/v1/receipts/{receipt}").status_code == 200
            and pool.get(f"/receipts/{receipt}")
        ),
        what="the receipt",
    )


def test_it_goes_on_where_it_stood_and_leaves_nothing(tmp_path: Path) -> None:
    groups = pools.cgroups()
    first = pools.start(tmp_path)
    family = first.descendants()
    names = {"coordinator", "gateway", "nats", "node-1", "node-2"}
    assert set(first.announced["pids"]) == names
    assert first.announced["nodes"] == 2
    receipt = settled(first, ask(first)["receipt"])
    balance = first.get(f"/accounts/{first.account}")
    tiers = {node["tier"] for node in first.get("/nodes")["data"]}
    if tiers == {"full"}:
        agents = {first.pid("node-1"), first.pid("node-2")}
        # One node is enough for `up` to be ready; the other's engine may still start.
        pools.until(
            lambda: agents <= {int(one.name.split("-")[1]) for one in pools.cgroups() - groups},
            what="a group of each node",
        )
    assert len(family) >= 5 + 2
    assert first.stop(signal.SIGINT) == 0
    assert not [one for one in family if pools.alive(one)]
    assert not (tmp_path / "run").exists()
    assert not [path for path in tmp_path.rglob("*") if path.is_socket()]
    assert not pools.cgroups_left(groups)

    with pools.running(tmp_path) as second:
        assert (second.api_key, second.account) == (first.api_key, first.account)
        assert second.get(f"/receipts/{receipt['id']}")["total_micro"] == receipt["total_micro"]
        after = second.get(f"/accounts/{second.account}")
        assert after["posted_micro"] == balance["posted_micro"]
        assert ask(second)["choices"]
        assert second.get("/status")["books_balance"]


def test_a_second_up_on_the_same_folder_is_refused(pool: RunningPool) -> None:
    done = subprocess.run(pools.command(pool.data_dir), capture_output=True, text=True, timeout=60)
    assert done.returncode == 6
    assert json.loads(done.stdout)["error"]["code"] == "already_running"
    assert pool.ready()


def test_a_port_in_use_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [POTLUCK, "up", "--data-dir", tmp_path, "--port", str(port)],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert f"port {port} cannot be used" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--nodes", "0"],
        ["--nodes", "1000"],
        ["--port", "70000"],
        ["--model", "/nowhere.gguf"],
        ["--model", __file__],
    ],
)
def test_settings_that_cannot_be(tmp_path: Path, options: list[str]) -> None:
    done = subprocess.run(
        [POTLUCK, "up", "--json", "--data-dir", tmp_path, "--port", "0", *options],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert json.loads(done.stdout)["error"]["mend"]


def test_it_says_why_an_engine_cannot_load_its_model(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(pools.TINY.read_bytes()[:1_000_000])
    process = subprocess.Popen(
        [*pools.command(tmp_path / "data"), "--model", str(broken)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        error, mend = process.stderr.readline(), process.stderr.readline()
        assert error.startswith("error: node-")
        assert "cannot serve broken: " in error
        assert "corrupted or incomplete" in error
        assert mend.startswith("mend: ")
        assert "--model" in mend
        assert str(tmp_path / "data" / "nodes") in mend
    finally:
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=pools.END_S)
    assert said == ""


def test_a_settings_file_is_read_and_checked(tmp_path: Path) -> None:
    (tmp_path / "potluck.toml").write_text('nodes = "two"\n')
    done = subprocess.run(
        [POTLUCK, "up", "--data-dir", tmp_path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "nodes" in done.stderr
    (tmp_path / "potluck.toml").write_text("nodes = 1\n")
    with pools.running(tmp_path) as pool:
        assert pool.announced["nodes"] == 1
        assert pool.children() == ["coordinator", "gateway", "nats", "node-1"]


def test_down_ends_it(tmp_path: Path) -> None:
    pool = pools.start(tmp_path)
    family = pool.descendants()
    done = pool.cli("down", "--json")
    assert json.loads(done.stdout)["stopped"] is True
    assert pool.process.wait(30) == 0
    pool.stop()
    assert not [one for one in family if pools.alive(one)]
    again = pool.cli("down", "--json")
    assert json.loads(again.stdout)["stopped"] is False


@pytest.mark.parametrize("mend", ["up", "down"])
def test_a_killed_up_takes_its_children_along_and_is_swept(tmp_path: Path, mend: str) -> None:
    groups = pools.cgroups()
    pool = pools.start(tmp_path)
    family = pool.descendants()
    full = {node["tier"] for node in pool.get("/nodes")["data"]} == {"full"}
    receipt = ask(pool)["receipt"]
    settled(pool, receipt)
    pool.stop(signal.SIGKILL)
    pools.until(lambda: not any(pools.alive(one) for one in family), what="the children's end")
    # The control: a killed agent removes no group, and the comparison sees what it left.
    assert bool(pools.cgroups_left(groups)) == full
    if mend == "down":
        swept = json.loads(pool.cli("down", "--json").stdout)["swept"]
        assert any("control group" in one for one in swept) == full
        assert not pools.cgroups_left(groups)
        return
    with pools.running(tmp_path) as second:
        assert second.get(f"/receipts/{receipt}")
        assert ask(second)["choices"]
        assert second.get("/status")["books_balance"]
        assert not pools.cgroups_left(groups)


def readable_by_others(folder: Path) -> list[Path]:
    """All but models, which a sandbox's user must read; the folders above them are closed."""
    found = [folder]
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            public = path.parent.name == "models" and path.suffix == ".gguf"
            # Neither is read: a link leads elsewhere, a socket lies in a folder that is closed.
            other = stat.S_ISLNK(status.st_mode) or stat.S_ISSOCK(status.st_mode)
            if not public and not other and status.st_mode & 0o077:
                found.append(path)
    return found[0 if folder.stat().st_mode & 0o077 else 1 :]


def test_nothing_of_a_pool_is_readable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        data = tmp_path / "data"
        # An earlier version left it open.
        data.mkdir(mode=0o755)
        with pools.running(data) as pool:
            settled(pool, ask(pool)["receipt"])
            inside = [path for path in data.rglob("*") if path.is_file()]
            names = {path.name for path in inside}
            assert {"pool.db", "journal", "credentials.json", "gateway.log"} <= names
            assert [name for name in names if name.startswith("engine-")]
            assert readable_by_others(data) == []
            # The control: it would be seen.
            (data / "nodes" / "open").write_text("x")
            assert readable_by_others(data) == [data / "nodes" / "open"]
    finally:
        os.umask(before)


@pytest.mark.parametrize("owner", ["another user", "one that has ended"])
def test_down_says_plainly_what_it_cannot_end(tmp_path: Path, owner: str) -> None:
    if os.getuid() != 0:
        pytest.skip("needs two users")
    with as_nobody() as folder:
        command = [str(readable_python(folder)), "-m", "potluck", "down", "--json"]
        data = folder / "data"
        (data / "run").mkdir(parents=True)
        pid = os.getpid() if owner == "another user" else 2**22 - 1
        mark = {"pid": pid, "started_s": psutil.Process(os.getpid()).create_time()}
        state = {"url": "", "nodes": 1, "supervisor": mark, "children": {}, "restarts": {}}
        (data / "run" / "supervisor.json").write_text(json.dumps(state))
        for path in (data, *data.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        done = subprocess.run(
            [*command, "--data-dir", str(data)], capture_output=True, text=True, timeout=60,
            user=NOBODY, group=NOBODY, extra_groups=[], cwd=folder, check=False,
            env={"HOME": str(folder), "PATH": os.environ["PATH"]},
        )  # fmt: skip
    assert "Traceback" not in done.stderr
    answer = json.loads(done.stdout)
    if owner == "another user":
        assert done.returncode == 6
        assert answer["error"]["code"] == "not_permitted"
    else:
        assert done.returncode == 0
        assert answer["stopped"] is False


def test_the_bus_keeps_the_port_that_it_chose(tmp_path: Path) -> None:
    with pools.running(tmp_path) as pool:
        config = tmp_path / "run" / "nats.json"
        port = json.loads(config.read_text())["port"]
        assert port > 0
        old = pool.pid("nats")
        assert port in listening(old)
        psutil.Process(old).kill()
        again = "another start on the same port"
        pools.until(lambda: port in listening(pool.pids().get("nats", old)), what=again)
        pools.until(pool.ready, what="a ready pool")


def listening(pid: int) -> set[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(pid).net_connections("tcp")
        return {one.laddr.port for one in found if one.status == psutil.CONN_LISTEN}
    return set()


def test_as_a_plain_user() -> None:
    """The whole way without root: its own folder, its own limits, the tier said honestly."""
    if os.getuid() != 0:
        pytest.skip("the other tests run as a plain user already")
    with as_nobody() as folder:
        environment = {"HOME": str(folder), "PATH": f"{POTLUCK.parent}:{os.environ['PATH']}"}
        with pools.running(
            folder / "data", launcher=[str(readable_python(folder)), "-m", "potluck"],
            user=NOBODY, group=NOBODY, extra_groups=[], env=environment, cwd=folder,
        ) as pool:  # fmt: skip
            assert all(one.uids().real == NOBODY for one in pool.descendants())
            assert ask(pool)["choices"]
            for node in pool.get("/nodes")["data"]:
                assert node["tier"] in ("full", "limited")
                assert node["tier_reason"]


def readable_python(folder: Path) -> Path:
    """An interpreter that any user can run, with the packages of this one."""
    if traversable_by_others(Path(sys.executable)):
        return Path(sys.executable)
    system = Path("/usr/bin/python3")
    version = [system, "-c", "import sys; print(*sys.version_info[:2])"]
    if not system.exists() or subprocess.run(
        version, capture_output=True, text=True, check=True
    ).stdout.split() != [str(part) for part in sys.version_info[:2]]:
        pytest.skip("no interpreter of this version that another user can read")
    subprocess.run([system, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    packages = next((folder / "venv" / "lib").glob("python*")) / "site-packages"
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "borrowed.pth").write_text("\n".join(lines))
    return folder / "venv" / "bin" / "python"


@contextlib.contextmanager
def as_nobody():
    """A folder that nobody owns, outside the root-only folders of the test runner."""
    folder = Path("/var/tmp") / f"potluck-nobody-{os.getpid()}"
    folder.mkdir()
    os.chown(folder, NOBODY, NOBODY)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def traversable_by_others(path: Path) -> bool:
    folders = {*path.parents, *path.resolve().parents}
    return all(folder.stat().st_mode & 0o001 for folder in folders)


def test_a_terminal_sees_no_process_left_when_interrupted_early(tmp_path: Path) -> None:
    process = subprocess.Popen(
        pools.command(tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    pools.until(lambda: (tmp_path / "run" / "supervisor.json").exists(), what="the start")
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=40)
    assert not [one for one in family if pools.alive(one)]
