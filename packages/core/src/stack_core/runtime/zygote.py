"""Forks workers from a process that has imported everything and used no device, and watches them end."""

import atexit
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

__all__ = ["Child", "die_with_parent", "fork", "state_of"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Child:
    """A forked worker.

    Attributes:
      pidfd: readable once it has ended.
      said: a pipe of what it says, one JSON object a line.
      printed: a pipe of its standard output and error.
    """

    pid: int
    pidfd: int
    said: int
    printed: int

    def close(self) -> None:
        for descriptor in (self.pidfd, self.said, self.printed):
            os.close(descriptor)


def fork(run: Callable[[TextIO], int]) -> Child:
    """Forks this process, which must have one thread; the child calls `run` with where to speak, and exits.

    The child dies with its parent, keeps no descriptor of it, and has a session of its own.
    """
    said, says = os.pipe()
    printed, prints = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _settle(parent, says, prints)
            status = run(os.fdopen(says, "w", buffering=1))
        except BaseException:  # nothing may return to the code of the parent
            traceback.print_exc()
        finally:
            _leave(status)
    os.close(says)
    os.close(prints)
    for descriptor in (said, printed):
        os.set_blocking(descriptor, False)
    return Child(pid, os.pidfd_open(pid), said, printed)


def state_of(pid: int) -> str | None:
    """The state letter of a process of this machine, "T" for one that a signal stopped; None when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def die_with_parent(parent: int) -> None:
    """Ends this process by SIGKILL when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _settle(parent: int, says: int, prints: int) -> None:
    die_with_parent(parent)
    os.setsid()
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != says:
            try:
                os.close(descriptor)
            except OSError:  # the one that listed them
                continue
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _leave(status: int) -> None:
    """Exits; after a failure at once, as JAX's farewell would wait for the other processes."""
    try:
        if status == 0:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
