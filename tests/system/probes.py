"""What a hostile program would try, run by a plain python3; each prints one JSON line of facts.

`python3 probes.py NAME [ARGUMENT]`. Stands alone: it is run inside the sandbox and outside.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path


def host_file(path: str) -> dict:
    """Read a secret of the host, and write beside it."""
    facts = {}
    for name, act in (
        ("read", lambda: Path(path).read_text()),
        ("write", lambda: Path(path + ".written").write_text("")),
        ("list_root", lambda: os.listdir("/root")),
        ("list_home", lambda: os.listdir("/home")),
        ("passwd", lambda: Path("/etc/passwd").read_text()),
    ):
        try:
            act()
            facts[name] = True
        except OSError as error:
            facts[name] = error.strerror
    return facts


def network(port: str) -> dict:
    """Reach a listener of the host on loopback; open a netlink socket."""
    facts: dict = {}
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=2).close()
        facts["connect"] = True
    except OSError as error:
        facts["connect"] = error.strerror or str(error)
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
        facts["netlink"] = True
    except OSError as error:
        facts["netlink"] = error.strerror
    return facts


def other_process(pid: str) -> dict:
    """See and kill a process of the host."""
    facts = {
        "visible": os.path.exists(f"/proc/{pid}/stat"),
        "pids": len([name for name in os.listdir("/proc") if name.isdigit()]),
    }
    try:
        os.kill(int(pid), signal.SIGKILL)
        facts["killed"] = True
    except OSError as error:
        facts["killed"] = error.strerror
    return facts


def keyctl(_: str) -> dict:
    """add_key(2): a key in the session's keyring (x86-64: 248; elsewhere 217)."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = 248 if os.uname().machine == "x86_64" else 217
    got = libc.syscall(number, b"user", b"potluck-probe", b"x", 1, -3)
    return {"added": got > 0, "errno": ctypes.get_errno()}


def namespaces(_: str) -> dict:
    libc = ctypes.CDLL(None, use_errno=True)
    got = libc.unshare(0x10000000)
    return {"unshared": got == 0, "errno": ctypes.get_errno()}


def forks(most: str) -> dict:
    """Fork until refused, or `most` times."""
    children = []
    refused = None
    for _ in range(int(most)):
        try:
            pid = os.fork()
        except OSError as error:
            refused = error.strerror
            break
        if pid == 0:
            time.sleep(30)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    return {"forked": len(children), "refused": refused}


def memory(most_mib: str) -> dict:
    """Touch memory until refused, or `most_mib`. By cgroup: killed before it can answer."""
    held = []
    for mib in range(int(most_mib)):
        try:
            held.append(bytearray(os.urandom(1)) * (1024 * 1024))
        except MemoryError:
            return {"mib": mib, "refused": True}
    return {"mib": len(held), "refused": False}


def limits(_: str) -> dict:
    return {"nproc": resource.getrlimit(resource.RLIMIT_NPROC)[0], "uid": os.getuid()}


def fill(most_mib: str) -> dict:
    """Write one file of `most_mib` in the folder where it stands."""
    path, mib = Path("filled"), 0
    try:
        with path.open("wb", buffering=0) as file:
            while mib < int(most_mib):
                file.write(bytes(1024 * 1024))
                mib += 1
    except OSError as error:
        return {"mib": mib, "refused": error.strerror}
    finally:
        path.unlink()
    return {"mib": mib, "refused": None}


def hang(_: str) -> dict:
    print(json.dumps({"hanging": True}), flush=True)
    time.sleep(600)
    return {}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2] if len(sys.argv) > 2 else "")), flush=True)
