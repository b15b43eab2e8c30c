"""Child processes that end with their parent."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

STAGE: Final = "/run"
"""Hidden from the child by what is staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None: not limited."""

    memory_bytes: int | None = None
    pids: int | None = None
    cpu_cores: float | None = None
    file_bytes: int | None = None
    """Of each file it writes, its log among them; needs no cgroup."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What to start. File descriptors in `pass_fds` stay open in the child under their number."""

    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    name: str
    """Unique on this machine while it runs: names the cgroup."""
    limits: Limits = field(default_factory=Limits)
    drop_to_uid: int | None = None
    """Become this user (and group) before exec; only root can."""
    pass_fds: Sequence[int] = ()
    staged: Sequence[tuple[Path, str]] = ()
    """(source, name): shown to the child alone as `STAGE/name`, bind-mounted before the uid is
    dropped, so that it reaches what lies in folders closed to that uid. Only root can."""


class SpawnError(Exception):
    """The program could not be started, or a limit that was asked for could not be set."""


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """The exit status; negative: the signal that ended it."""

    async def stop(self, grace_ms: int) -> None:
        """Ask, then kill it with all its descendants, and remove its cgroup. Returns when they
        are gone."""


class Processes(Protocol):
    def limits_available(self) -> tuple[bool, str]:
        """Whether memory, pids and CPU of a child can be limited by cgroups, and else why not."""

    async def spawn(
        self, command: Command, on_exit: Callable[[int], None] | None = None
    ) -> Process:
        """Returns once the program runs. Raises `SpawnError`. Cancelled, it leaves nothing."""
