"""The command line's own parts in one process: words, tables, settings, and a terminal's edge."""

import http.server
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.cells import cell_len
from rich.console import Console

from potluck.cli import connection, main, mends, output, settings, up
from potluck.cli.commands import keys, pool, receipts, run
from potluck.cli.failures import CommandError
from potluck.cli.folder import DataFolder
from potluck.cli.founding import CredentialsFile
from potluck.cli.progress import Starting
from potluck.cli.wrapping import Wrapping
from potluck.client.client import _refused
from potluck.core import parameters
from potluck.core.refusals import Refusal
from potluck.messages.views import (
    AcceleratorView,
    HoldView,
    KeyView,
    ModelView,
    NodeView,
    ReceiptLineView,
    ReplicaView,
    TransferView,
)

NARROW = 80
NOW_MS = int(time.time() * 1000)
POTLUCK = Path(sys.executable).with_name("potluck")
ULID = "01M91HZ1CPCBMXYT7CYN9QQNJX"
CORRUPT = (
    "the engine ended with 1: 0.00.008.912 W srv init: security: no API key is set\n"
    "0.00.011.309 E llama_model_load: error loading model: the file is incomplete\n"
    "0.00.011.329 E llama_model_load_from_file_impl: failed to load model"
)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal of 80 columns shows, without its colours."""
    shown = io.StringIO()
    console = Console(file=shown, width=NARROW, highlight=False, force_terminal=True,
                      color_system=None, legacy_windows=False)  # fmt: skip
    monkeypatch.setattr(output, "screen", console)
    monkeypatch.setattr(output, "errors", console)
    return shown


class FakeClient:
    """Answers every method with what it was given under that name."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self._answers[name]


def shown_by(
    monkeypatch: pytest.MonkeyPatch, shown: io.StringIO, command: Callable[..., None],
    **answers: Any,
) -> str:  # fmt: skip
    monkeypatch.setattr(connection, "connect", lambda *_: FakeClient(**answers))
    command()
    return shown.getvalue()


def replica(state: str, **more: Any) -> ReplicaView:
    fields: dict[str, Any] = {
        "model": "mistral-7b-instruct-v0.2.q4_k_m", "digest": "d", "state": state, "slots": 4,
        "in_flight": 1, "context_tokens": 2048, "detail": "", "fetched_bytes": 45,
        "size_bytes": 100,
    }  # fmt: skip
    return ReplicaView(**(fields | more))


def node(liveness: str, *replicas: ReplicaView, silent_s: int = 0, **more: Any) -> NodeView:
    fields: dict[str, Any] = {
        "id": "node_a", "name": "node-1", "liveness": liveness, "account": "acc_a",
        "tier": "limited", "tier_reason": "no control groups can be made here", "version": "0.1.0",
        "hostname": "h", "os": "Linux", "arch": "x86_64", "cpu_model": "c", "cpu_cores": 1,
        "cpu_percent": 1.0, "memory_bytes": 2**34, "memory_free_bytes": 2**33,
        "disk_free_bytes": 2**33,
        "accelerators": [AcceleratorView("cuda", "NVIDIA GeForce RTX 4090", 24 * 2**30)],
        "replicas": list(replicas), "receipts_waiting": 0,
        "heard_ms": int(time.time() * 1000) - silent_s * 1000, "joined_ms": 0,
    }  # fmt: skip
    return NodeView(**(fields | more))


# Tables


@pytest.mark.parametrize(
    "one",
    [
        node("alive"),
        node("alive", replica("ready")),
        node("alive", replica("fetching")),
        node("alive", replica("loading")),
        node("alive", replica("stopping")),
        node("alive", replica("failed", detail=CORRUPT)),
        node("alive", replica("ready", model="x" * 128), name="n" * 128),
        node("suspect", replica("ready"), silent_s=14),
        node("dead", silent_s=300_000),
        node("draining", replica("stopping")),
    ],
    ids=lambda one: f"{one.liveness}-{'-'.join(found.state for found in one.replicas)}",
)
def test_nodes_fit_and_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO, one: NodeView
) -> None:
    text = shown_by(monkeypatch, terminal, pool.nodes, nodes=[one])
    assert_fits(text)
    whole = "".join(text.split())
    for found in one.replicas:
        assert found.state in whole


def assert_fits(text: str) -> None:
    assert text.strip()
    assert all(cell_len(line) <= NARROW for line in text.splitlines()), text
    assert "…" not in text.replace("_…", "")


def test_a_silent_node_shows_when_it_was_heard_and_no_live_figures(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO
) -> None:
    text = shown_by(monkeypatch, terminal, pool.nodes, nodes=[node("dead", silent_s=300)])
    assert "last heard 5 minutes ago" in " ".join(text.split())
    assert "free" not in text
    assert "nothing yet" not in text


def test_a_failed_replica_says_why(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> None:
    failed = node("alive", replica("failed", detail=CORRUPT))
    text = " ".join(shown_by(monkeypatch, terminal, pool.nodes, nodes=[failed]).split())
    assert "error loading model: the file is incomplete" in text
    assert "no API key" not in text


def model() -> ModelView:
    return ModelView(
        id="mistral-7b-instruct-v0.2.q4_k_m", digest="d", size_bytes=2**42, format="gguf",
        licence="Apache-2.0 with LLVM exceptions", context_tokens=1_048_576, memory_bytes=2**40,
        redundancy_class="r", input_micro_per_mtok=12_345_678, output_micro_per_mtok=12_345_678,
        fee_basis_points=1_050, replicas_ready=10, replicas_wanted=64,
    )  # fmt: skip


def key(name: str, account: str, **more: Any) -> KeyView:
    fields: dict[str, Any] = {"created_ms": 0, "expires_ms": NOW_MS + 10**9, "revoked_ms": None}
    return KeyView(
        id=f"key_{ULID}", account=f"acc_{account}{ULID[1:]}", name=name, admin=True,
        **(fields | more),
    )  # fmt: skip


def receipt() -> ReceiptLineView:
    return ReceiptLineView(
        id=f"rcp_{ULID}_1", request="r", attempt=1, account=None, node="n",
        model="mistral-7b-instruct-v0.2.q4_k_m", outcome="stop", prompt_tokens=131_072,
        completion_tokens=131_072, total_micro=10**12, refusal="price_mismatch", settled_ms=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "answers"),
    [
        (pool.models, {"models": [model()]}),
        (keys.show, {"keys": [key("a laptop", "A"), key("another", "B", revoked_ms=1)]}),
        (keys.show, {"keys": [key("a laptop", "A"), key("another", "A", expires_ms=1)]}),
        (lambda: receipts.listing(limit=20), {"receipts": [receipt()]}),
        (lambda: receipts.listing(limit=20), {"receipts": []}),
        (pool.nodes, {"nodes": []}),
        (pool.models, {"models": []}),
    ],
)
def test_lists_fit_and_are_never_bare(
    monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO, command: Callable[..., None],
    answers: dict[str, Any],
) -> None:  # fmt: skip
    assert_fits(shown_by(monkeypatch, terminal, command, **answers))


def test_the_readme_says_how_long_money_is_on_hold() -> None:
    page = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    assert parameters.hold_block_micro == parameters.MICRO_PER_CREDIT
    assert "up to one credit" in page
    assert parameters.hold_life_ms == 10 * 60_000
    assert "Ten minutes after the last request" in page
    assert f"free {parameters.hold_grace_ms // 60_000} minutes after the hold expires" in page


def test_a_ledger_of_large_amounts_fits(terminal: io.StringIO) -> None:
    line = TransferView(
        id="t", kind="starting_credit", payer=f"acc_{ULID}", payee=f"acc_{ULID}",
        amount_micro=10**15, cause=f"rcp_{ULID}_1", hold=None, at_ms=NOW_MS,
    )  # fmt: skip
    pool.ledger([line])
    assert_fits(terminal.getvalue())


def test_no_column_vanishes_on_a_narrow_screen(terminal: io.StringIO) -> None:
    output.screen.width = 30
    output.table(("~kind", "amount"), [("starting credit", "1" * 28)])
    assert "startingcredit" in re.sub(r"[\s1]", "", terminal.getvalue())


def test_a_hold_shows_both_ends_that_its_json_names(terminal: io.StringIO) -> None:
    hold = HoldView(f"hold_{ULID}", "acc_a", "gw_a", 10**6, 110, NOW_MS, NOW_MS + 900_000, "open")
    row = pool._hold_row(hold)
    assert row[1:] == ("0.999890", output.moment(NOW_MS), output.moment(NOW_MS + 900_000))


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes"), (1_000, "1,000 nodes")]
)
def test_one_is_no_plural(number: int, text: str) -> None:
    assert output.count(number, "node") == text


# Help, mends and usage


def commands(app: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, inner in getattr(app, "commands", {}).items():
        yield from commands(inner, (*path, name))


ALL = sorted(commands(typer.main.get_command(main.app)))


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_whole_at_80_columns(path: tuple[str, ...], capsys: Any) -> None:
    assert main.app([*path, "--help"], standalone_mode=False) == 0
    text = capsys.readouterr().out
    assert "..." not in text.replace("[ARGS]...", "")
    assert all(len(line) <= NARROW for line in text.splitlines())
    short = main.app([*path, "-h"], standalone_mode=False), capsys.readouterr().out
    assert short == (0, text)


def test_every_refusal_has_a_mend() -> None:
    assert set(Refusal) | {mends.UNREACHABLE} == set(mends.MENDS)
    assert all(mends.MENDS.values())
    assert mends.mend("from a later version")


@pytest.mark.parametrize("path", [path for path in ALL if path not in ((), ("up",))], ids=" ".join)
def test_no_mend_of_what_any_command_meets_names_itself(path: tuple[str, ...]) -> None:
    """Who has no pool, or a key that is none, is not sent in a circle."""
    for code in (mends.UNREACHABLE, Refusal.INVALID_KEY, Refusal.COORDINATOR_UNAVAILABLE):
        assert f"`potluck {' '.join(path)}" not in mends.mend(code)


def potluck(*arguments: str, **rest: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [POTLUCK, *arguments], capture_output=True, text=True, timeout=60, check=False, **rest
    )


@pytest.mark.parametrize(
    ("arguments", "cause", "mend"),
    [
        (["nonsense"], "no such command 'nonsense'", "`potluck --help`"),
        (["keys", "nonsense"], "no such command 'nonsense'", "`potluck keys --help`"),
        (["up", "--bogus"], "no such option: --bogus", "`potluck up --help`"),
        (["up", "--nodes", "two"], "'--nodes'", "`potluck up --help`"),
        (["keys", "create"], "missing argument 'name'", "`potluck keys create --help`"),
        (["status", "--url"], "requires an argument", "`potluck status --help`"),
        (["receipt", "list", "--limit", "0"], "'--limit'", "`potluck receipt list --help`"),
        (["status", "--url", "nonsense"], "'nonsense'", "http://"),
        (["status", "--url", "http://192.0.2.1"], "no key", "--api-key"),
        (["status", "--url", "http://127.0.0.1:9", "--api-key", "é"], "the API key", "copy"),
        (["chat", ""], "the question is empty", "potluck chat"),
        (["chat", " \n"], "the question is empty", "potluck chat"),
        (["chat", "\udcff"], "the question is no text", "UTF-8"),
    ],
)
def test_usage_errors_look_like_all_others(
    tmp_path: Path, arguments: list[str], cause: str, mend: str
) -> None:
    for people in (True, False):
        done = potluck(*arguments, *([] if people else ["--json"]),
                       env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})  # fmt: skip
        if arguments == ["status", "--url"] and not people:
            continue  # `--json` would be the address.
        assert done.returncode == 2, done
        if people:
            error, said = done.stderr.splitlines()
            assert done.stdout == ""
            assert error.startswith("error: ")
            assert said.startswith("mend: ")
        else:
            found = json.loads(done.stdout)["error"]
            error, said = found["message"], found["mend"]
            assert done.stderr == ""
            assert found["code"] == "usage"
        assert cause in error
        assert mend in said


def test_an_empty_pipe_is_no_question(tmp_path: Path) -> None:
    done = potluck("chat", input="\n", env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)})
    assert done.returncode == 2
    assert "the question is empty" in done.stderr


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version(flag: str) -> None:
    done = potluck(flag)
    assert (done.returncode, done.stdout) == (0, "Potluck 0.1.0\n")


@pytest.mark.parametrize("path", [[], ["keys"], ["receipt"]], ids=" ".join)
def test_a_command_of_commands_lists_them(path: list[str]) -> None:
    done = potluck(*path)
    assert done.returncode == 2
    assert "Commands:" in done.stderr


def test_an_address_with_v1_is_understood() -> None:
    with connection.connect(None, "http://127.0.0.1:9/v1/", "pk_x") as client:
        assert str(client._http.base_url) == "http://127.0.0.1:9"


def test_the_owners_key_is_shown_to_no_other_machine(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.credentials.write_text('{"url": "http://127.0.0.1:9", "api_key": "pk", "account": "a"}')
    with connection.connect(tmp_path, "http://localhost:9", None) as client:
        assert client._http.headers["authorization"] == "Bearer pk"
    with pytest.raises(CommandError, match="no key is given"):
        connection.connect(tmp_path, "http://example.com", None)


def test_what_is_said_first_stands_first() -> None:
    """Both streams into one pipe, where standard output has a buffer."""
    program = "import sys; from potluck.cli import output; sys.stdout.write('answer\\n'); "
    done = subprocess.run(
        [sys.executable, "-c", program + "output.note('a bill')"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "answer\na bill\n"


def test_a_refused_parameter_is_named() -> None:
    frame = {"error": {"message": "Expected `int` <= 9", "code": "invalid_request", "param": "n"}}
    assert str(_refused(frame, 400)) == "n: Expected `int` <= 9"


@pytest.mark.parametrize("status", [200, 404])
def test_what_is_no_pool_is_named_so(tmp_path: Path, status: int) -> None:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        done = potluck("status", "--url", url, "--api-key", "x", "--data-dir", str(tmp_path))
        other.shutdown()
    assert done.returncode == (1 if status == 200 else 3)
    assert "pool" in done.stderr
    assert "check --url" in done.stderr
    assert "html" not in done.stderr


# Settings


def mistakes(folder: Path, text: str, **flags: Any) -> list[CommandError]:
    (folder / "potluck.toml").write_text(text)
    chosen: dict[str, Any] = {"port": None, "nodes": None, "model": None}
    return settings.for_up(DataFolder(folder), **(chosen | flags))[1]


@pytest.mark.parametrize(
    ("text", "cause", "mend"),
    [
        ("prot = 1", "there is no setting `prot`", "did you mean `port`?"),
        ("node = 1", "there is no setting `node`", "did you mean `nodes`?"),
        ("zzz = 1", "there is no setting `zzz`", "there are model, nodes, port"),
        ("[up]\nport = 1", "there is no setting `up`", "there are"),
        ("port = true", "port cannot be True", "a whole number"),
        ("model = 7", "model cannot be 7", "text in quotes"),
        ("nodes = 0", "nodes cannot be 0", "choose 1 to 64"),
        ("nodes = ", "is no TOML", "mend or remove"),
    ],
)
def test_a_mistake_in_the_settings_file(tmp_path: Path, text: str, cause: str, mend: str) -> None:
    (found,) = mistakes(tmp_path, text)
    assert cause in found.cause
    assert "potluck.toml" in found.cause
    assert mend in found.mend
    assert found.exit_code == 2


def test_all_mistakes_are_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POTLUCK_NODES", "two")
    monkeypatch.delenv("POTLUCK_PORT", raising=False)
    found = mistakes(tmp_path, "prot = 1\nmodle = 2", port=70_000)
    assert [one.cause.split(": ")[-1] for one in found] == [
        "there is no setting `prot`", "there is no setting `modle`", "--port cannot be 70000",
        "POTLUCK_NODES cannot be 'two'",
    ]  # fmt: skip
    assert all(one.mend for one in found)


def test_a_missing_model_and_a_taken_port_are_told_together(tmp_path: Path) -> None:
    with up._listening(0) as taken:
        port = str(taken.getsockname()[1])
        arguments = ["up", "--data-dir", str(tmp_path), "--port", port, "--model", "/nowhere.gguf"]
        plain = potluck(*arguments)
        error = json.loads(potluck(*arguments, "--json").stdout)["error"]
    assert plain.returncode == 1
    assert re.findall("^(error|mend):", plain.stderr, re.M) == ["error", "mend"] * 2
    assert f"port {port} cannot be used" in plain.stderr
    assert "/nowhere.gguf cannot be read" in plain.stderr
    assert [one["code"] for one in (error, *error["more"])] == ["port_in_use", "invalid_setting"]


# What `up` says


@pytest.mark.parametrize(("number", "text"), [(1, "1 node."), (2, "2 nodes.")])
def test_up_says_whose_key_it_prints(
    tmp_path: Path, terminal: io.StringIO, number: int, text: str
) -> None:
    started: Any = SimpleNamespace(
        folder=DataFolder(tmp_path / "my pool"),
        settings=settings.UpSettings(port=0, nodes=number, model=None),
        owner=CredentialsFile(url="http://127.0.0.1:1", api_key="pk_" + 60 * "x", account="acc"),
    )
    run._welcome(started)
    said = terminal.getvalue()
    assert text in said
    assert "admin's key" in said
    assert f"  export OPENAI_API_KEY={started.owner.api_key}\n" in said
    assert f"keys create NAME --data-dir '{tmp_path}/my pool'\n" in said


# What `up` waits for


def waiting(terminal: io.StringIO, nodes: list[NodeView], *moments_s: float) -> str:
    """What is said to nobody in particular: without a terminal."""
    clock = [0.0]
    starting = Starting(lambda name: f"look at {name}", lambda: clock[0])
    starting._watched = False
    starting._line = starting._bars.add_task("starting", total=None)
    for moment_s in moments_s:
        clock[0] = moment_s
        starting.show("No node has a model ready.", nodes)
    return " ".join(terminal.getvalue().split())


def test_why_a_model_cannot_be_loaded_is_said_once_and_at_once(terminal: io.StringIO) -> None:
    one = node("alive", replica("failed", detail=CORRUPT))
    other = node("alive", replica("failed", detail=CORRUPT.replace("0.00.", "0.01.")))
    other.name = "node-2"
    text = waiting(terminal, [one, other], 0.0, 0.1, 0.2)
    assert text.count("error:") == 1
    assert "node-1, node-2 cannot serve mistral" in text
    assert "error loading model: the file is incomplete" in text
    assert "mend: look at node-1" in text


def test_who_waits_without_a_terminal_hears_for_what(terminal: io.StringIO) -> None:
    text = waiting(terminal, [node("alive", replica("fetching"))], 1.0, 9.0, 11.0, 12.0, 22.0)
    assert text.count("waiting for") == 2
    assert "waiting for 11 s: No node has a model ready: node-1 fetching mistral" in text
    assert "45 %" in text


# A terminal's edge


def on_screen(written: str) -> list[str]:
    """What a terminal that is wide enough makes of it."""
    rows, column = [""], 0
    for part in re.findall(r"\x1b\[\d+D|\x1b\[K|\n|[^\x1b\n]+", written):
        if part == "\n":
            rows.append("")
            column = 0
        elif part == "\x1b[K":
            rows[-1] = rows[-1][:column]
        elif part.startswith("\x1b"):
            column -= int(part[2:-1])
        else:
            rows[-1] = rows[-1][:column] + part
            column += len(part)
    return rows


SAID = "Once upon a time there was a pool of machines, and everyone brought a little. \n\nThe end"


@pytest.mark.parametrize("piece", [1, 3, 7, 1000])
@pytest.mark.parametrize("width", [12, 20, 33, 80, 200])
def test_an_answer_breaks_between_words(piece: int, width: int) -> None:
    wrapping = Wrapping(lambda: width)
    pieces = [SAID[start : start + piece] for start in range(0, len(SAID), piece)]
    written = "".join(wrapping.feed(one) for one in pieces)
    rows = on_screen(written)
    assert all(len(row) < width for row in rows)
    assert " ".join(rows).split() == SAID.split()
    assert "" in rows[1:]


def test_nothing_waits_for_the_end_of_a_word() -> None:
    wrapping = Wrapping(lambda: 80)
    assert [wrapping.feed(one) for one in ("Hel", "lo", " wor", "ld")] == [
        "Hel",
        "lo",
        " wor",
        "ld",
    ]


def test_what_has_no_spaces_is_broken_at_the_edge() -> None:
    rows = on_screen(Wrapping(lambda: 11).feed("x" * 25))
    assert rows == ["x" * 10, "x" * 10, "x" * 5]
    wide = on_screen(Wrapping(lambda: 11).feed("池" * 7))
    assert wide == ["池" * 5, "池" * 2]


def test_a_model_cannot_command_the_terminal() -> None:
    shown = Wrapping(lambda: 80).feed("a\x1b]0;title\x07b\x9bc\rd\u202ee 1\u00a0000 é")
    assert shown == "a]0;titlebcde 1\u00a0000 é"
