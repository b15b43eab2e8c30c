"""Dies, and leaves a process in a group of its own: `python orphan.py LOG` prints its pid."""

import os
import subprocess
import sys

from potluck.adapters import cgroups
from potluck.ports.processes import Limits


def main() -> None:
    group = cgroups.Group(cgroups.find(), "orphan")
    group.create(Limits(pids=5))
    with open(sys.argv[1], "w") as log:
        child = subprocess.Popen(["/bin/sleep", "60"], stdout=log, stderr=log)
    for entrance in group.entrances():
        with open(entrance, "w") as file:
            file.write(str(child.pid))
    print(child.pid, flush=True)
    os._exit(0)


main()
