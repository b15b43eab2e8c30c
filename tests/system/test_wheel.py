"""The wheel, with the token path compiled, does what the sources do (ADR 0011)."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADER = Path(sysconfig.get_path("include")) / "Python.h"
SAME_TESTS = ("tests/core", "tests/golden", "tests/cluster/test_gateway_http.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    shutil.which("cc") is None or not HEADER.exists(), reason="needs a C compiler and Python.h"
)
def test_the_compiled_wheel_passes_the_same_tests(tmp_path: Path) -> None:
    sources = tmp_path / "sources"
    shutil.copytree(ROOT / "src", sources / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / name, sources)
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    run([sys.executable, "-m", "pip", "wheel", *options, sources], POTLUCK_COMPILE="1")
    (wheel,) = tmp_path.glob("potluck-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    site = str(tmp_path / "site")
    where = "from potluck.gateway.http import exchange; print(exchange.__file__)"
    found = run([sys.executable, "-c", where], PYTHONPATH=site)
    assert found.strip().startswith(site)
    assert found.strip().endswith(".so")
    told = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *SAME_TESTS],
        PYTHONPATH=site,
    )
    assert " passed" in told


def run(argv: list[object], **environment: str) -> str:
    done = subprocess.run(
        argv, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout
