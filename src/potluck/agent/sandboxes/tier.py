"""What this machine's sandbox can promise: `full` with cgroups, `limited` with rlimits alone.

`probe` looks at what is installed; only `prove`, which runs a program inside, knows that it works.
"""

import asyncio
import shutil
import tempfile
from pathlib import Path

from potluck.agent.sandboxes import bubblewrap, seccomp
from potluck.core import parameters
from potluck.ports.processes import Limits, Processes, SpawnError

_LOG_TAIL_BYTES = 500


def probe(processes: Processes) -> tuple[str, str]:
    """(tier, reason): `full`, `limited` or `none`. `none` means that no engine may be started."""
    try:
        bubblewrap.find()
        seccomp.check()
    except (bubblewrap.SandboxError, seccomp.SeccompError) as error:
        return "none", str(error)
    limited, reason = processes.limits_available()
    if limited:
        return "full", reason
    return "limited", f"{reason}; memory is bounded for each process alone, and CPU is not"


async def prove(processes: Processes, node: str) -> tuple[str, str]:
    """As `probe`, and `none` with the reason where `true` cannot be run in a sandbox."""
    found, reason = probe(processes)
    if found == "none":
        return found, reason
    folder = Path(tempfile.mkdtemp(prefix="potluck-proof-"))
    try:
        failure = await _failure(processes, node, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ("none", failure) if failure else (found, reason)


async def _failure(processes: Processes, node: str, folder: Path) -> str:
    work, log = folder / "work", folder / "log"
    work.mkdir()
    box = bubblewrap.Box(
        name=f"proof-{folder.name}",
        argv=["/usr/bin/true"],
        work=work,
        limits=Limits(memory_bytes=parameters.sandbox_tmp_bytes, pids=16, cpu_cores=1.0),
        log=log,
    )
    try:
        with bubblewrap.command(box, bubblewrap.unprivileged_uid(node)) as command:
            process = await processes.spawn(command)
    except (bubblewrap.SandboxError, SpawnError, OSError) as error:
        return str(error)
    try:
        async with asyncio.timeout(parameters.sandbox_proof_timeout_ms / 1000):
            status = await process.wait()
    except TimeoutError:
        return "a program in the sandbox did not end"
    finally:
        await process.stop(0)
    words = log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
    return "" if status == 0 else f"a program in the sandbox ended with {status}: {words}"
