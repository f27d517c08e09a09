"""Worker processes, forked from a process that has imported everything but used no device."""

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
      pid: process id.
      pidfd: descriptor that is readable once the process has ended.
      messages: pipe of its messages, one JSON object per line.
      printed: pipe of its standard output and error.
    """

    pid: int
    pidfd: int
    messages: int
    printed: int

    def close(self) -> None:
        for descriptor in (self.pidfd, self.messages, self.printed):
            os.close(descriptor)


def fork(run: Callable[[TextIO], int]) -> Child:
    """Forks this process, which must have one thread; the child calls `run` with its message pipe and exits.

    The child dies with its parent, closes all inherited descriptors, and has its own session.
    """
    messages, sending = os.pipe()
    printed, prints = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _settle(parent, sending, prints)
            status = run(os.fdopen(sending, "w", buffering=1))
        except BaseException:  # the child must never return into the parent's code
            traceback.print_exc()
        finally:
            _leave(status)
    os.close(sending)
    os.close(prints)
    for descriptor in (messages, printed):
        os.set_blocking(descriptor, False)
    return Child(pid, os.pidfd_open(pid), messages, printed)


def state_of(pid: int) -> str | None:
    """Returns the state letter of a local process ("T" if a signal stopped it); None for a process that is gone."""
    try:
        # The name of the program precedes the state and may contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(1)


def _settle(parent: int, sending: int, prints: int) -> None:
    die_with_parent(parent)
    # A session of its own, because Ctrl-C on a terminal goes to the driver only.
    os.setsid()
    os.dup2(prints, 1)
    os.dup2(prints, 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if descriptor > 2 and descriptor != sending:
            try:
                os.close(descriptor)
            except OSError:  # the descriptor of the listing itself, closed already
                continue
    # The agent ignores SIGINT, which a worker must not inherit.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _leave(status: int) -> None:
    """Exits the process; after a failure without exit handlers, since JAX's shutdown would wait for other processes."""
    try:
        if status == 0:
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
