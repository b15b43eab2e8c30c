"""Which system calls a sandboxed program may not make, as BPF for `bwrap --seccomp`.

A deny-list: an engine is a large program we do not audit, but these calls it never needs, and they
reach parts of the kernel where sandboxes were escaped before. Needs libseccomp (pyseccomp).
"""

import errno
import os
import tempfile
from typing import Final

_NAMES: Final = (
    # Mounts and other views of the file system
    "mount umount2 pivot_root move_mount open_tree fsopen fsmount fsconfig fspick mount_setattr "
    "chroot name_to_handle_at open_by_handle_at "
    # Other processes
    "ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd move_pages "
    "migrate_pages "
    # Namespaces
    "unshare setns "
    # Kernel machinery with a history
    "bpf perf_event_open userfaultfd keyctl add_key request_key io_uring_setup io_uring_enter "
    "io_uring_register vmsplice fanotify_init modify_ldt uselib ustat sysfs lookup_dcookie "
    "nfsservctl quotactl acct "
    # The machine
    "kexec_load kexec_file_load init_module finit_module delete_module reboot swapon swapoff "
    "syslog vhangup iopl ioperm settimeofday clock_settime clock_adjtime adjtimex sethostname "
    "setdomainname"
)
DENIED: Final = tuple(_NAMES.split())
NAMESPACE_FLAGS: Final = (
    0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x04000000, 0x08000000, 0x02000000,
)  # fmt: skip
"""CLONE_NEW{USER,PID,NET,NS,UTS,IPC,CGROUP}."""
_AF_INET6: Final = 10
_AF_REFUSED: Final = range(3, _AF_INET6)
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C


class SeccompError(Exception):
    """The filter cannot be built here: no libseccomp."""


def policy() -> int:
    """An open file descriptor that holds the BPF program; the caller closes it."""
    try:
        import pyseccomp as sc
    except (ImportError, RuntimeError, OSError) as error:
        raise SeccompError(f"libseccomp cannot be used: {error}") from error
    rules = sc.SyscallFilter(sc.ALLOW)
    for name in DENIED:
        # Unknown on this architecture: then it cannot be called either.
        if sc.resolve_syscall(sc.Arch.NATIVE, name) >= 0:
            rules.add_rule(sc.ERRNO(errno.EPERM), name)
    for flag in NAMESPACE_FLAGS:
        rules.add_rule(sc.ERRNO(errno.EPERM), "clone", sc.Arg(0, sc.MASKED_EQ, flag, flag))
    # Its flags are behind a pointer, which a filter cannot read; libc falls back to clone.
    rules.add_rule(sc.ERRNO(errno.ENOSYS), "clone3")
    # Only unix and internet sockets; AF_NETLINK, AF_VSOCK and the rest reach the host's kernel.
    rules.add_rule(sc.ERRNO(errno.EAFNOSUPPORT), "socket", sc.Arg(0, sc.GT, _AF_INET6))
    for family in _AF_REFUSED:
        rules.add_rule(sc.ERRNO(errno.EAFNOSUPPORT), "socket", sc.Arg(0, sc.EQ, family))
    for request in (_TIOCSTI, _TIOCLINUX):
        rules.add_rule(sc.ERRNO(errno.EPERM), "ioctl", sc.Arg(1, sc.MASKED_EQ, 0xFFFFFFFF, request))
    return _exported(rules)


def check() -> None:
    """Raises `SeccompError` where no filter can be built."""
    os.close(policy())


def _exported(rules: object) -> int:
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)  # type: ignore[attr-defined]
        descriptor = os.dup(file.fileno())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
