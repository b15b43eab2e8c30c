"""What this machine has, and how busy it is, as the system reports it."""

import os
import platform
from collections.abc import Callable
from pathlib import Path

import psutil

from potluck.messages.membership import Accelerator, Inventory
from potluck.ports.accelerators import Accelerators


def take(accelerators: Accelerators, data: Path) -> Inventory:
    """`data`: the folder whose disk counts."""
    return Inventory(
        hostname=platform.node(),
        os=platform.system(),
        arch=platform.machine(),
        cpu_model=_cpu_model(),
        cpu_cores=os.cpu_count() or 1,
        memory_bytes=int(_measured(lambda: psutil.virtual_memory().total)),
        disk_free_bytes=disk_free_bytes(data),
        accelerators=[
            Accelerator(one.kind, one.name, one.memory_bytes) for one in accelerators.list()
        ],
    )


def disk_free_bytes(data: Path) -> int:
    return int(_measured(lambda: psutil.disk_usage(str(data)).free))


def memory_free_bytes() -> int:
    return int(_measured(lambda: psutil.virtual_memory().available))


def cpu_percent() -> float:
    """Of all cores, since the last call."""
    return _measured(lambda: psutil.cpu_percent(None))


def _measured(measure: Callable[[], float]) -> float:
    """0 where the system would not say: a folder that is gone, a /proc that is closed."""
    try:
        return measure()
    except (OSError, psutil.Error, ValueError):
        return 0


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
