"""Every command, for people and for programs; exit codes; receipts checked offline."""

import json
import os
import subprocess
from pathlib import Path

import msgspec
import pytest

from potluck.adapters.keys import Ed25519Verifier
from potluck.client import receipts
from potluck.messages.views import ReceiptView
from tests.system import pools
from tests.system.pools import POTLUCK, RunningPool


@pytest.fixture(scope="module")
def answer(pool: RunningPool) -> dict:
    """One answered question and its settled, countersigned receipt."""
    said = json.loads(pool.cli("chat", "Tell me about the sea.", "--json").stdout)
    pools.until(
        lambda: (
            (found := pool.http.get(f"/api/v1/receipts/{said['receipt']}")).status_code == 200
            and found.json()["countersigned"]
        ),
        what="the countersigned receipt",
    )
    return said


def test_chat(pool: RunningPool, answer: dict) -> None:
    assert answer["text"]
    assert answer["usage"]["completion_tokens"] >= 1
    assert answer["finish_reason"] in ("stop", "length")
    done = pool.cli("chat", "Tell me about the sea.", "--temperature", "0", "--max-tokens", "5")
    assert done.stdout.strip()
    assert "receipt rcp_" in done.stderr
    from_stdin = subprocess.run(
        [POTLUCK, "chat", "--data-dir", pool.data_dir], input="Tell me", capture_output=True,
        text=True, check=True, timeout=60,
    )  # fmt: skip
    assert from_stdin.stdout.strip()


@pytest.mark.parametrize(
    "command",
    [["status"], ["nodes"], ["models"], ["balance"], ["keys", "list"], ["receipt", "list"]],
    ids=" ".join,
)
def test_every_look_has_two_faces(pool: RunningPool, answer: dict, command: list[str]) -> None:
    for_people = pool.cli(*command)
    assert for_people.stdout.strip()
    assert for_people.stderr == ""
    for_programs = pool.cli(*command, "--json")
    assert for_programs.stdout.count("\n") == 1
    assert json.loads(for_programs.stdout)
    assert for_programs.stderr == ""


def test_what_is_shown_is_true(pool: RunningPool, answer: dict) -> None:
    status = json.loads(pool.cli("status", "--json").stdout)
    assert status["nodes_alive"] == 2
    assert status["books_balance"] is True
    nodes = json.loads(pool.cli("nodes", "--json").stdout)
    assert sorted(node["name"] for node in nodes) == ["node-1", "node-2"]
    assert all(node["cpu_cores"] == os.cpu_count() for node in nodes)
    assert all(node["replicas"][0]["state"] == "ready" for node in nodes)
    balance = json.loads(pool.cli("balance", "--json").stdout)
    account = balance["account"]
    assert account["available_micro"] == account["posted_micro"] - account["pending_micro"]
    spent = 10_000_000 - account["posted_micro"]
    assert spent > 0
    ledger = pool.get("/ledger?limit=1000")["data"]
    used = [line for line in ledger if line["payer"] == pool.account]
    assert sum(line["amount_micro"] for line in used) == spent


def test_keys_live_and_end(pool: RunningPool) -> None:
    made = json.loads(pool.cli("keys", "create", "laptop", "--json").stdout)
    assert made["key"].startswith("pk_")
    with_key = ["--url", pool.url, "--api-key", made["key"]]
    asked = subprocess.run(
        [POTLUCK, "chat", "Hello", "--json", *with_key], capture_output=True, text=True, timeout=60
    )
    assert asked.returncode == 0
    assert made["key"] not in pool.cli("keys", "list", "--json").stdout
    assert pool.cli("keys", "revoke", made["id"], "--json").returncode == 0

    def refused() -> bool:
        asked = subprocess.run(
            [POTLUCK, "chat", "Hello", "--json", *with_key],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        code = json.loads(asked.stdout).get("error", {}).get("code")
        return asked.returncode == 6 and code in ("revoked_key", "invalid_key")

    pools.until(refused, what="the refusal")


def test_a_key_expires(pool: RunningPool) -> None:
    made = json.loads(pool.cli("keys", "create", "brief", "--life", "1", "--json").stdout)
    headers = {"authorization": f"Bearer {made['key']}"}

    def expired() -> bool:
        answer = pool.http.get("/v1/models", headers=headers)
        return answer.status_code == 401 and answer.json()["error"]["code"] == "expired_key"

    pools.until(expired, what="the key's end")


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        (["receipt", "show", "rcp_NOBODY_1"], 3, "receipt_not_found"),
        (["keys", "revoke", "key_NOBODY"], 3, "key_not_found"),
        (["chat", "Hello", "--model", "nobody"], 3, "model_not_found"),
        (["status", "--api-key", "pk_wrong"], 6, "invalid_key"),
        (["status", "--url", "http://127.0.0.1:9"], 1, "unreachable"),
    ],
)
def test_exit_codes(pool: RunningPool, arguments: list[str], status: int, code: str) -> None:
    done = pool.cli(*arguments, "--json", check=False)
    assert done.returncode == status
    assert json.loads(done.stdout)["error"]["code"] == code
    plain = pool.cli(*arguments, check=False)
    assert plain.returncode == status
    assert plain.stdout == ""
    assert "error:" in plain.stderr
    assert "Traceback" not in plain.stderr


def test_usage_and_absence(tmp_path: Path) -> None:
    wrong = subprocess.run([POTLUCK, "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2
    nowhere = subprocess.run(
        [POTLUCK, "status", "--data-dir", tmp_path], capture_output=True, text=True
    )
    assert nowhere.returncode == 3
    assert "potluck up" in nowhere.stderr


def test_a_receipt_is_shown_and_verified_offline(
    pool: RunningPool, answer: dict, tmp_path: Path
) -> None:
    shown = pool.cli("receipt", "show", answer["receipt"])
    assert "usage" in shown.stdout
    assert "fee" in shown.stdout
    document = pool.cli("receipt", "show", answer["receipt"], "--json").stdout
    file = tmp_path / "receipt.json"
    file.write_text(document)
    verified = verify(file)
    assert verified.returncode == 0, verified.stdout
    names = {check["name"] for check in json.loads(verified.stdout)["checks"]}
    assert {"node's signature", "gateway's signature", "amounts", "settled"} <= names


def test_any_changed_byte_of_a_receipt_fails(
    pool: RunningPool, answer: dict, tmp_path: Path
) -> None:
    """Every 37th byte, so that all parts of the document are met; the checks run in one process."""
    document = pool.cli("receipt", "show", answer["receipt"], "--json").stdout.strip().encode()
    assert holds(document)
    changed = 0
    for position in range(0, len(document), 37):
        altered = bytearray(document)
        altered[position] ^= 1
        try:
            view = msgspec.json.decode(bytes(altered), type=ReceiptView)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            changed += 1
            continue
        assert not all(check.ok for check in receipts.verify(view, Ed25519Verifier())), position
        changed += 1
    assert changed > 50
    file = tmp_path / "receipt.json"
    dearer = json.loads(document)
    dearer["total_micro"] += 1
    file.write_text(json.dumps(dearer))
    assert verify(file).returncode == 6


def holds(document: bytes) -> bool:
    done = subprocess.run(
        [POTLUCK, "receipt", "verify", "-", "--json"], input=document, capture_output=True
    )
    return done.returncode == 0


def verify(file: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [POTLUCK, "receipt", "verify", str(file), "--json"],
        capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
