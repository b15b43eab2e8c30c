"""Runs one probe in the real sandbox, or outside as its control.

`python -m tests.system.box FOLDER PROBE [ARGUMENT] [--no-cgroups]` does the former as whatever user
it is run by; its own process, so that a plain user can be tried from root.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from potluck.adapters.processes import LocalProcesses
from potluck.agent.sandboxes import bubblewrap
from potluck.ports.processes import Limits

PROBES = Path(__file__).with_name("probes.py")
PYTHON = "/usr/bin/python3"
MEMORY_MIB = 64
PIDS = 24
FILE_MIB = 4


async def _run(folder: Path, probe: str, argument: str, cgroups: bool) -> dict:
    work, log = folder / "work", folder / "log"
    work.mkdir()
    program = folder / "probes.py"
    shutil.copyfile(PROBES, program)
    program.chmod(0o644)
    processes = LocalProcesses(use_cgroups=cgroups)
    box = bubblewrap.Box(
        name=f"probe-{folder.name}-{time.monotonic_ns()}",
        argv=[PYTHON, "-I", "-S", "-B", "/opt/probes.py", probe, argument],
        work=work,
        shown=((program, "/opt/probes.py"),),
        limits=Limits(
            memory_bytes=MEMORY_MIB << 20, pids=PIDS, cpu_cores=1.0, file_bytes=FILE_MIB << 20
        ),
        log=log,
    )
    with bubblewrap.command(box, bubblewrap.unprivileged_uid("probe")) as command:
        process = await processes.spawn(command)
    if probe == "hang":
        while b"hanging" not in log.read_bytes():
            await asyncio.sleep(0.02)
        print(json.dumps({"pid": process.pid}), flush=True)
    status = await process.wait()
    await process.stop(1_000)
    available, reason = processes.limits_available()
    return {
        "status": status, "log": log.read_text(), "tier": "full" if available else "limited",
        "reason": reason,
    }  # fmt: skip


def facts(output: str) -> dict:
    """The probe's own line; empty if it was killed before it could say anything."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {}


def outside(probe: str, argument: str, **changes: object) -> dict:
    """The control: the same probe, free, to show that it would succeed."""
    done = subprocess.run(
        [PYTHON, "-I", "-S", "-B", str(PROBES), probe, argument],
        capture_output=True, text=True, timeout=60, check=False, cwd=tempfile.gettempdir(),
        **changes,
    )  # fmt: skip
    return facts(done.stdout)


if __name__ == "__main__":
    given = [one for one in sys.argv[1:] if not one.startswith("--")]
    found = asyncio.run(
        _run(Path(given[0]), given[1], (given + [""])[2], "--no-cgroups" not in sys.argv)
    )
    print(json.dumps(found))
