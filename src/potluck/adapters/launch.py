"""What a child runs between fork and its real program: `python -I -S launch.py JSON`.

Standard library only, and alone in its process: no threads that a fork could break. Order matters:
cgroups and mounts as root, limits, the uid, the death signal (a change of uid clears it), exec.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 0x00020000
_MS_NOSUID_NODEV = 2 | 4
_MS_BIND = 4096
_MS_REC = 16384
_MS_PRIVATE = 1 << 18


def main() -> None:
    order = json.loads(sys.argv[1])
    report = order["report_fd"]
    os.set_inheritable(report, False)
    try:
        _confine(order)
        os.execve(order["argv"][0], order["argv"], dict(os.environ))  # noqa: S606
    except OSError as error:
        os.write(report, f"{order['argv'][0]}: {error}".encode())
        os._exit(127)


def _confine(order: dict) -> None:  # type: ignore[type-arg]
    for entrance in order["entrances"]:
        with open(entrance, "w") as file:
            file.write("0")
    libc = ctypes.CDLL(None, use_errno=True)
    if order["staged"]:
        _stage(libc, order["stage"], order["staged"])
    for name, most in order["rlimits"]:
        resource.setrlimit(getattr(resource, name), (most, most))
    if order["uid"] is not None:
        os.setgroups([])
        os.setresgid(order["uid"], order["uid"], order["uid"])
        os.setresuid(order["uid"], order["uid"], order["uid"])
    for option, value in ((_PR_SET_PDEATHSIG, signal.SIGKILL), (_PR_SET_NO_NEW_PRIVS, 1)):
        _checked(libc.prctl(option, value, 0, 0, 0), "prctl")
    if os.getppid() != order["parent"]:
        # The parent died before its death could be signalled.
        os._exit(1)


def _stage(libc: ctypes.CDLL, stage: str, staged: list[tuple[str, str]]) -> None:
    """A mount namespace of the child's own, in which `stage` shows what was asked for."""
    _checked(libc.unshare(_CLONE_NEWNS), "unshare")
    _mount(libc, "none", "/", None, _MS_REC | _MS_PRIVATE)
    # Opened before the stage is covered: a source may lie below it.
    sources = [(os.open(source, os.O_PATH), name) for source, name in staged]
    _mount(libc, "none", stage, "tmpfs", _MS_NOSUID_NODEV)
    os.chmod(stage, 0o755)  # noqa: S103
    os.umask(0o022)
    for descriptor, name in sources:
        target = os.path.join(stage, name)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        _mount(libc, f"/proc/self/fd/{descriptor}", target, None, _MS_BIND | _MS_REC)
        os.close(descriptor)


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int) -> None:
    kind_bytes = kind.encode() if kind is not None else None
    done = libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), None)
    _checked(done, f"mount {target}")


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
