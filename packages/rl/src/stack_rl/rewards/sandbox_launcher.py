"""Launcher script, `python -I -S sandbox_launcher.py`: isolates itself, then runs an untrusted program.

Standard input contains a line of JSON, the order, then the program, then the program's input. The order:

    {"level": "namespaces" | "session", "program_bytes": bytes, "python": path, "paths": [...], "libraries": [...],
     "folder": path, "wall_s": s, "limits": {"RLIMIT_AS": bytes, ...}, "files_bytes": bytes, "report": descriptor}

"namespaces" creates a read-only file system with only Python, a small in-memory /tmp, no network except a loopback that
is down, and a PID namespace that ends with its first process. The launcher stays outside, kills the program after
`wall_s` or on SIGTERM, and exits with the program's status. "session" creates none of these and replaces itself by the
program. Both drop root, set the limits and forbid new privileges. The launcher's messages go to the descriptor
`report`, which the program does not inherit: "timeout", or "refused: " with the reason why the program could not start.
"""

# Every start of a program pays for these imports, hence no `pathlib`.
# ruff: noqa: PTH103, PTH106, PTH110, PTH112, PTH114, PTH115, PTH120, PTH123, PTH211

import contextlib
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from typing import Any, NoReturn

NOBODY = 65534
# CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNS, CLONE_NEWNET and CLONE_NEWIPC of <sched.h>.
_NEW_USER, _NEW_PIDS, _NEW_MOUNTS, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000000, 0x20000, 0x40000000, 0x8000000
# MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC and MS_PRIVATE of <sys/mount.h>.
_READ_ONLY, _NO_SETUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
# MNT_DETACH: an ordinary unmount fails, because the old root contains other mounts.
_DETACH = 2
SHOWN = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
_libc = ctypes.CDLL(None, use_errno=True)


def called(name: str, *arguments: Any) -> None:
    """Calls a function of the C library.

    Raises:
      OSError: the call failed.
    """
    if getattr(_libc, name)(*arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(
    source: str | None, target: str, kind: str | None = None, flags: int = 0, options: str | None = None
) -> None:
    encoded = [None if each is None else each.encode() for each in (source, target, kind, options)]
    called("mount", encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])


def unshare(is_root: bool) -> None:
    """Enters new mount, network, IPC and PID namespaces; without root, also a new user namespace."""
    flags = _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC | _NEW_PIDS | (0 if is_root else _NEW_USER)
    user, group = os.geteuid(), os.getegid()
    called("unshare", flags)
    if not is_root:
        for name, text in (
            # First, because the kernel refuses an unprivileged gid_map while setgroups is allowed.
            ("setgroups", "deny"),
            ("uid_map", f"{NOBODY} {user} 1"),
            ("gid_map", f"{NOBODY} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def enter_root(order: dict[str, Any]) -> None:
    """Creates and enters a read-only file system with Python and its files, and a /tmp of `files_bytes`."""
    # Private, because shared mounts would propagate to the machine, and pivot_root rejects shared mounts.
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    root = order["folder"]
    _mount("root", root, "tmpfs", _NO_SETUID | _NO_DEVICES, "mode=755,size=1m")
    os.makedirs(root + "/tmp")  # first, because some of the paths may be below the machine's /tmp
    _mount("tmp", root + "/tmp", "tmpfs", _NO_SETUID | _NO_DEVICES, f"mode=777,size={order['files_bytes']}")
    for path in [*SHOWN, *DEVICES, *order["paths"]]:
        if os.path.exists(path):
            _show(path, root + path)
    os.makedirs(root + "/old", exist_ok=True)
    called("syscall", _pivot_root(), root.encode(), (root + "/old").encode())
    os.chdir("/")
    called("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    _mount(None, "/", None, _REMOUNT | _BIND | _READ_ONLY | _NO_SETUID | _NO_DEVICES)


def _show(path: str, place: str) -> None:
    """Bind-mounts a file or folder of the machine read-only; a symbolic link is copied."""
    os.makedirs(os.path.dirname(place), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), place)
        return
    if os.path.exists(place):  # inside a folder that is already mounted
        return
    if os.path.isdir(path):
        os.makedirs(place)
    else:
        os.close(os.open(place, os.O_CREAT, 0o644))
    _mount(path, place, None, _BIND | _RECURSIVE)
    if path not in DEVICES:
        _make_read_only(place)


def _make_read_only(place: str) -> None:
    """Makes a tree of mounts read-only with the system call `mount_setattr` of Linux 5.12 and later."""
    attributes = struct.pack("QQQQ", 1, 0, 0, 0)  # MOUNT_ATTR_RDONLY
    # -100 is AT_FDCWD, and 0x8000 is AT_RECURSIVE: the tree may contain further mounts.
    called("syscall", 442, -100, place.encode(), 0x8000, attributes, len(attributes))


def _pivot_root() -> int:
    # The C library lacks a wrapper of this system call.
    return {"x86_64": 155, "aarch64": 41, "riscv64": 41}[os.uname().machine]


def begin(order: dict[str, Any], program: int) -> NoReturn:
    """Replaces this process, and thereby the launcher's memory, by the program in a file."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    # PR_SET_PDEATHSIG, only now because a change of user clears the setting.
    called("prctl", 1, signal.SIGKILL, 0, 0, 0)
    called("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    for name, value in order["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    folder = "/tmp" if order["level"] == "namespaces" else order["folder"]
    os.chdir(folder)
    # With a limit of one process, numerical libraries abort when they start threads.
    threads = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LC_ALL": "C.UTF-8", **threads}
    # The program is passed as a file, because an argument cannot contain NUL or exceed 128 KiB.
    execute = f"exec(compile(open({program}, 'rb').read(), '<program>', 'exec'))"
    paths = f"__import__('sys').path.extend({order['libraries']!r}); "
    os.set_inheritable(program, True)
    os.execve(order["python"], [order["python"], "-I", "-S", "-B", "-c", paths + execute], environment)


def run(order: dict[str, Any], program: int) -> int:
    """Runs the program as a child, kills it and its descendants after `wall_s`, and returns the exit status."""
    # Only children enter the new PID namespace. The first one is its init process: when it ends, the kernel kills all
    # others.
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            begin(order, program)
        except BaseException as error:  # the child must not return into the launcher's code
            _refuse(order, error)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    called("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: processes of the same user cannot read its memory
    until_s = time.monotonic() + order["wall_s"]
    while time.monotonic() < until_s:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.write(order["report"], b"timeout")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def _refuse(order: dict[str, Any], error: BaseException) -> NoReturn:
    os.write(order["report"], f"refused: {type(error).__name__}: {error}".encode())
    os._exit(1)


def _read_order() -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)  # byte by byte, because the program follows the line
        if not byte:
            sys.exit("no order on standard input")
        line += byte
    return json.loads(line)


def _read_program(size_bytes: int) -> int:
    """Reads the program into an in-memory file and returns its descriptor."""
    program = os.memfd_create("program")
    while size_bytes:
        part = os.read(0, min(size_bytes, 1 << 20))
        if not part:
            sys.exit("no whole program on standard input")
        size_bytes -= len(part)
        while part:
            part = part[os.write(program, part) :]
    os.lseek(program, 0, os.SEEK_SET)
    return program


def _main() -> NoReturn:
    order = _read_order()
    program = _read_program(order["program_bytes"])
    os.set_inheritable(order["report"], False)  # closed by execve
    try:
        if order["level"] == "session":
            begin(order, program)
        unshare(os.geteuid() == 0)
        enter_root(order)
        status = run(order, program)
    except (OSError, KeyError) as error:
        _refuse(order, error)
    if status < 0:  # die by the same signal as the program
        with contextlib.suppress(OSError, ValueError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    _main()
