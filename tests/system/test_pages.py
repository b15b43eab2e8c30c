"""Commands and programs in README and guides are run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import pools
from tests.system.pools import POTLUCK, RunningPool

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
STARTS = ("make run", "make test")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.splitlines() if line]
    return [line for line in lines if line not in STARTS]


def test_the_two_commands_are_targets_of_the_makefile() -> None:
    assert set(STARTS) <= {line for block in blocks("sh") for line in block.splitlines()}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert {"run", "test", "setup", "check", "bench"} <= set(targets)


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme(pool: RunningPool, tmp_path: Path, command: str) -> None:
    receipt = pool.http.post(
        "/v1/chat/completions",
        json={"model": "tiny-q8_0", "messages": [{"role": "user", "content": "Hello"}]},
    ).headers["x-potluck-receipt"]
    pools.until(
        lambda: pool.http.get(f"/api/v1/receipts/{receipt}").status_code == 200, what="the receipt"
    )
    text = command.replace(".venv/bin/potluck", str(POTLUCK)).replace("RECEIPT", receipt)
    if "verify" in text:
        shown = pool.cli("receipt", "show", receipt, "--json").stdout
        (tmp_path / "receipt.json").write_text(shown)
    done = subprocess.run(
        ["sh", "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "POTLUCK_DATA_DIR": str(pool.data_dir)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout or "receipt.json" in command


def test_the_program_of_the_readme(pool: RunningPool, tmp_path: Path) -> None:
    (program,) = blocks("python")
    program = (
        program.replace("http://127.0.0.1:8477", pool.url)
        .replace("pk_…", pool.api_key)
        .replace("smollm2-135m-instruct", "tiny-q8_0")
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
