"""What this machine's sandbox can promise: `full` with cgroups, `limited` with rlimits alone."""

from potluck.agent.sandboxes import bubblewrap, seccomp
from potluck.ports.processes import Processes


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
