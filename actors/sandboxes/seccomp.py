"""The system calls that no box may make, as a filter for bubblewrap.

What is denied is what an unprivileged process does not need and what has been the way out of sandboxes: mounts and new
namespaces, other processes' memory, kernel keys, programs and modules, and the sockets that no network namespace holds.
The filter needs the system library libseccomp; without it there is none, and no box either.
"""

import errno
import functools
import os
from types import ModuleType

from headrace.platform.errors import ConfigError

_DENIED = [
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "move_mount",
    "open_tree",
    "fsopen",
    "fsconfig",
    "fsmount",
    "fspick",
    "mount_setattr",
    "unshare",
    "setns",
    "open_by_handle_at",
    "name_to_handle_at",
    "fanotify_init",
    "quotactl",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "pidfd_getfd",
    "kcmp",
    "keyctl",
    "add_key",
    "request_key",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "lookup_dcookie",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "kexec_load",
    "kexec_file_load",
    "init_module",
    "finit_module",
    "delete_module",
    "reboot",
    "swapon",
    "swapoff",
    "acct",
    "syslog",
    "nfsservctl",
    "vhangup",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
    "sethostname",
    "setdomainname",
    "iopl",
    "ioperm",
    "modify_ldt",
]
_CLONE_NEWUSER = 0x10000000
_OTHER_NAMESPACES = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x20000000, 0x40000000)
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_NETLINK = 16
_FIX = "apt-get install libseccomp2"


def why_no_filter() -> str:
    """Why the filter cannot be made here, with the fix; empty when it can."""
    try:
        program()
    except ConfigError as error:
        return str(error)
    return ""


@functools.cache
def program() -> bytes:
    """The filter, as the kernel takes it. Raises ConfigError when it cannot be made whole."""
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(f"no seccomp filter: {error} (fix: pip install pyseccomp; {_FIX})") from None
    try:
        return _exported(pyseccomp)
    except (OSError, ValueError) as error:
        raise ConfigError(f"libseccomp cannot make the filter: {error} (fix: {_FIX}, version 2.5 or newer)") from None


def filter_descriptor() -> int:
    """A descriptor from which the filter can be read once; the caller closes it."""
    file = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    os.write(file, program())
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _exported(library: ModuleType) -> bytes:
    rules = library.SyscallFilter(library.ALLOW)
    refuse, missing = library.ERRNO(errno.EPERM), library.ERRNO(errno.ENOSYS)
    for name in _DENIED:
        rules.add_rule(refuse, name)
    for flag in (_CLONE_NEWUSER, *_OTHER_NAMESPACES):
        rules.add_rule(refuse, "clone", library.Arg(0, library.MASKED_EQ, flag, flag))
    # Its flags lie in memory, where no filter can look: programs fall back to clone.
    rules.add_rule(missing, "clone3")
    for request in (_TIOCSTI, _TIOCLINUX):
        rules.add_rule(refuse, "ioctl", library.Arg(1, library.MASKED_EQ, 0xFFFFFFFF, request))
    # Unix, internet and netlink sockets are held by namespaces; those of virtual machines and of the kernel's
    # cryptography are not.
    rules.add_rule(library.ERRNO(errno.EAFNOSUPPORT), "socket", library.Arg(0, library.GT, _AF_NETLINK))
    file = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    with os.fdopen(file, "w+b") as stream:
        rules.export_bpf(stream)
        stream.seek(0)
        return stream.read()
