"""`stack profile run`: runs a script as Python would, and captures it from its first device on, or on demand."""

import argparse
import contextlib
import json
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from stack_core.abi.config import parse
from stack_profile.captures.capture import Capture, capture
from stack_profile.captures.continuous import Continuous
from stack_profile.captures.listener import listen
from stack_profile.captures.memory_snapshot import exhausted_message
from stack_profile.captures.out_of_memory import save_out_of_memory
from stack_profile.captures.recording import backend_started
from stack_profile.captures.ring import ContinuousConfig
from stack_profile.captures.stacks import STACKS_HZ
from stack_profile.errors import CaptureError

__all__ = ["run_script"]

_POLL_S: Final = 0.001
# Modes in which an option has an effect: one capture of the script, --listen or --continuous.
_SETTINGS: Final = {
    "delay_s": ("capture",),
    "duration_s": ("capture",),
    "host_tracer_level": ("capture",),
    "stacks_hz": ("capture", "continuous"),
    "python_heap": ("capture",),
    "ring_mb": ("continuous",),
    "every_s": ("continuous",),
    "port": ("listen",),
    "json": ("capture",),
}


def run_script(tokens: Sequence[str]) -> None:
    """Runs the script in `tokens` after the options, and exits with its status if that is not 0.

    The capture begins when the script starts a JAX backend. Platforms, flags and a distributed runtime that the script
    sets up before are therefore effective.

    Raises:
      CaptureError: the script does not exist, or it used no JAX device.
    """
    options = _parser().parse_args(tokens)
    if not options.module and not Path(options.script).is_file():
        raise CaptureError(f"There is no script {options.script!r}. Name a file, or a module after -m.")
    _check_options(options)
    if options.listen or options.continuous:
        _run_observed(options)
        return
    captured = capture(
        options.out, **_chosen(options, "host_tracer_level", "stacks_hz"), python_heap=options.python_heap
    )
    with _Watch(captured, options.out, delay_s=options.delay_s or 0.0, duration_s=options.duration_s) as watch:
        status = _run(options, on_error=watch.fail)
    if watch.failure is not None and status == 0:
        raise watch.failure
    print(f"stack: {watch.failure or f'the trace is in {captured.wait()}'}", file=sys.stderr)
    if options.json:
        trace = None if watch.failure else str(captured.wait())
        print(json.dumps({"trace": trace, "status": status, "failure": str(watch.failure) if watch.failure else None}))
    if status:  # even if nothing was captured: the script's failure matters more
        sys.exit(status)


def _check_options(options: argparse.Namespace) -> None:
    """Raises a CaptureError for times that are not positive, and for options without effect in the chosen mode."""
    for name in ("delay_s", "duration_s"):
        value = getattr(options, name)
        if value is not None and not (value > 0 or (name == "delay_s" and value == 0)):
            raise CaptureError(f"--{name.replace('_', '-')} is {value:g}. Give a number of seconds above 0.")
    modes = [name for name in ("listen", "continuous") if getattr(options, name)]
    for name in _chosen(options, *_SETTINGS):
        flag, allowed = f"--{name.replace('_', '-')}", _SETTINGS[name]
        if not modes and "capture" not in allowed:
            mode = " and ".join(f"--{each}" for each in allowed)
            raise CaptureError(f"{flag} is a setting of {mode}, which is missing. Add it, or leave out {flag}.")
        if modes and not set(modes) & set(allowed):
            chosen = " and ".join(f"--{each}" for each in modes)
            raise CaptureError(f"{flag} has no effect with {chosen}. Leave out {flag}, or leave out {chosen}.")


def _chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the options that the command line sets."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _run_observed(options: argparse.Namespace) -> None:
    """Runs the script while it listens for captures, or records itself continuously, or both."""
    with contextlib.ExitStack() as stack:
        if options.continuous:
            settings = parse(ContinuousConfig, _chosen(options, "ring_mb", "every_s", "stacks_hz"))
            stack.enter_context(Continuous(options.out, settings))
            print(f"stack: captures: stack profile ring {options.out}", file=sys.stderr)
        if options.listen:
            listener = stack.enter_context(listen(port=options.port or 0))
            print(f"stack: to capture it, stack profile attach {listener.address.pid}", file=sys.stderr)
        status = _run(options, on_error=partial(save_out_of_memory, options.out))
    if status:
        sys.exit(status)


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors in one line."""

    def error(self, message: str) -> NoReturn:
        missing = "the following arguments are required: script, arguments"
        found = "Name a script to capture" if message == missing else f"{message[:1].upper()}{message[1:]}"
        raise CaptureError(
            f"{found}: stack profile run [--out DIR] [-m] SCRIPT ARGUMENTS ... "
            "`stack profile run --help` lists the options."
        )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="stack profile run", description="Capture a script without changing it.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("profile"), help="directory of the capture (default: profile)")
    parser.add_argument("--delay-s", type=float, help="seconds from the first use of a device to the capture (0)")
    parser.add_argument("--duration-s", type=float, help="seconds to capture, by default to the script's end")
    parser.add_argument("--host-tracer-level", type=int, help="1, 2 or 3: level of detail on the host (2)")
    parser.add_argument(
        "--stacks-hz", type=float, help=f"samples of Python stacks per second ({STACKS_HZ:g}); 0 for none"
    )
    parser.add_argument(
        "--python-heap", action="store_true", help="track Python's allocations by memray, which slows the script"
    )
    parser.add_argument("--listen", action="store_true", help="capture only on requests of `stack profile attach`")
    parser.add_argument(
        "--continuous", action="store_true", help="keep a ring of captures on disk, at most 0.5%% of a processor"
    )
    parser.add_argument("--ring-mb", type=float, help="size of the ring of --continuous in MB (default: 256)")
    parser.add_argument("--every-s", type=float, help="seconds between its captures (default: 60)")
    parser.add_argument("--port", type=int, help="port of --listen; by default any free port")
    parser.add_argument("--json", action="store_true", help="print the path of the trace as JSON when the script ends")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module instead of a file")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    return parser


class _Watch:
    """Context that starts a capture once JAX has a backend, and stops it after its duration or at the end of the block.

    Attributes:
      failure: error of a failed capture.
    """

    def __init__(self, captured: Capture, out: Path, *, delay_s: float, duration_s: float | None) -> None:
        self._capture, self._out, self._delay_s, self._duration_s = captured, out, delay_s, duration_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="capture-watch", daemon=True)
        self.failure: CaptureError | None = None

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()
        self._guarded(self._capture.stop)
        if self.failure is None and self._capture.path is None:
            self.failure = CaptureError(
                "Nothing was captured: the script ended before it used a JAX device, or before --delay-s had passed."
            )

    def fail(self, error: BaseException) -> None:
        """Stores the state of the memory if an error is that a device is out of memory, and ends a running capture."""
        if exhausted_message(error) and self._capture.is_running:
            self._guarded(lambda: self._capture.stop(settle=False, error=error))
        else:
            save_out_of_memory(self._out, error)

    def _watch(self) -> None:
        while not backend_started():
            if self._ended.wait(_POLL_S):
                return
        if self._ended.wait(self._delay_s):
            return
        self._guarded(self._capture.start)
        if self._duration_s is not None and not self._ended.wait(self._duration_s):
            self._guarded(lambda: self._capture.stop(settle=False))

    def _guarded(self, call: Any) -> None:
        try:
            call()
        except CaptureError as error:
            self.failure = self.failure or error


def _run(options: argparse.Namespace, *, on_error: Callable[[BaseException], object]) -> int:
    """Runs a script or module as `__main__` and returns its exit status.

    Args:
      options: the script, its arguments, and whether it is a module.
      on_error: called with an error that ends the script or one of its threads, while its frames exist.
    """
    script, arguments, module = options.script, options.arguments, options.module
    before = sys.argv, sys.path[0]
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path.cwd() if module else Path(script).resolve().parent)
    try:
        with _reporting_threads(on_error):
            if module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                _run_file(Path(script).resolve())
    except SystemExit as end:
        return _status(end.code)
    except BaseException as error:  # Like Python at top level: any error ends the script with a traceback.
        on_error(error)
        traceback.print_exception(error.with_traceback(_script_frames(error.__traceback__)))
        return 1
    finally:
        sys.argv, sys.path[0] = before
    return 0


@contextlib.contextmanager
def _reporting_threads(on_error: Callable[[BaseException], object]) -> Iterator[None]:
    """Calls `on_error` with errors that end threads, such as a server's engine."""
    before = threading.excepthook

    def report(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is not None:
            on_error(found.exc_value)
        before(found)

    threading.excepthook = report
    try:
        yield
    finally:
        threading.excepthook = before


def _run_file(path: Path) -> None:
    """Runs a file as `__main__`; runpy.run_path would put its absolute path into sys.argv."""
    main = types.ModuleType("__main__")
    main.__file__ = str(path)
    before = sys.modules["__main__"]
    sys.modules["__main__"] = main
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)
    finally:
        sys.modules["__main__"] = before


def _script_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Strips this module's frames from the start of a traceback."""
    outside = (__file__, contextlib.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in outside:
        trace = trace.tb_next
    return trace


def _status(code: object) -> int:
    """Returns the exit status of a SystemExit; a message is printed to standard error."""
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    return 1
