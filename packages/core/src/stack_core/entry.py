"""The process of the `stack` command: Ctrl-C ends it with status 130 and one line, at any time."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import TracebackType
from typing import NoReturn

__all__ = ["main"]


def main() -> None:
    """Runs `stack_core.cli.main`, which takes time to import."""
    lost = threading.Event()
    try:
        # `restart_with_huge_pages` blocks SIGINT while the interpreter restarts.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        _watch_lost_interrupts(lost)
        _restart_with_huge_pages()
        from stack_core.cli import main as run

        run()
    except KeyboardInterrupt:
        _leave()
    except Exception:
        if not lost.is_set():
            raise
        _leave()


def _restart_with_huge_pages() -> None:
    """Restarts the interpreter if the command needs it, before imports that the restart would repeat."""
    from stack_core.abi.errors import StackError
    from stack_core.command_names import command_name, uses_huge_pages
    from stack_core.runtime.huge_pages import restart_with_huge_pages

    with contextlib.suppress(StackError):  # `stack_core.cli.main` raises and prints it
        if uses_huge_pages(command_name(sys.argv[1:])):
            restart_with_huge_pages()


def _watch_lost_interrupts(lost: threading.Event) -> None:
    """Notes interrupts that Python prints instead of raising, and sends them again.

    Python cannot raise them in callbacks of the garbage collector. Extensions lose them while importing NumPy: they
    continue with an ImportError that does not name its cause.
    """

    def send_again() -> None:
        lost.set()
        threading.Timer(0.05, signal.raise_signal, [signal.SIGINT]).start()

    def unraisable(found: "sys.UnraisableHookArgs") -> None:
        send_again() if issubclass(found.exc_type, KeyboardInterrupt) else sys.__unraisablehook__(found)

    def printed(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        send_again() if issubclass(kind, KeyboardInterrupt) else sys.__excepthook__(kind, error, traceback)

    sys.unraisablehook, sys.excepthook = unraisable, printed


def _leave() -> NoReturn:
    """Ends the process even if a program is still compiling.

    JAX compiles in XLA threads that an interrupt does not reach. During a normal exit the interpreter frees the devices
    while they are in use, which is a segmentation fault; waiting for the threads may take minutes.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if (api := sys.modules.get("jax._src.api")) is not None:
        atexit.unregister(api.clean_up)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("stack: error: Interrupted.\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(130)
