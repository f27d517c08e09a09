"""Sandbox for untrusted programs: code in answers, and answer-checking libraries, which may hang.

| attack | protection |
|---|---|
| memory | `memory_bytes` of address space |
| full disk | an in-memory /tmp of `file_bytes`; in a session only the size of each file is limited |
| endless loop, sleep | `cpu_s` and `wall_s`, enforced by a launcher that the program cannot reach |
| threads, forks, a fork bomb | a limit of one process for a non-root user, and a PID namespace that dies with it |
| endless output | pipes that are read up to `output_bytes` |
| raising limits | hard limits, no root, no new privileges |
| network | a network namespace without a connection to the machine or beyond |
| files of the machine | a read-only file system with only Python |

Before its first program, a sandbox tries these attacks on itself. It does not start if an attack succeeds, unless
`SandboxConfig.open` allows it.
"""

import contextlib
import dataclasses
import functools
import json
import os
import selectors
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from pydantic import PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import SandboxError
from stack_rl.rewards.sandbox_launcher import DEVICES, NOBODY, SHOWN
from stack_rl.threads import Threads

__all__ = ["Gap", "ProgramResult", "Sandbox", "SandboxConfig"]

Level = Literal["bubblewrap", "namespaces", "session"]
Gap = Literal["network", "processes", "files", "disk"]
"""Access that a sandbox may leave open: the network, more processes, the machine's files, the disk via many files."""

_LAUNCHER: Final = Path(__file__).with_name("sandbox_launcher.py")
_GRACE_S: Final = 2.0
_PROBE_S: Final = 30.0
_READ_BYTES: Final = 1 << 16


@config
class SandboxConfig:
    """Isolation level and resource limits of programs.

    Attributes:
      level: "bubblewrap", which must be installed; "namespaces", which the kernel must allow; or "session", a separate
        session with limits only. None uses the first level that works.
      open: gaps to tolerate. A session leaves "network", "files" and "disk" open.
      wall_s: time limit of a program in seconds.
      cpu_s: CPU time limit of a program in seconds.
      memory_bytes: maximum address space of a program.
      output_bytes: maximum size of stdout and of stderr.
      file_bytes: maximum size of a file, and of all files together at levels with a private file system.
    """

    level: Level | None = None
    open: tuple[Gap, ...] = ()
    wall_s: PositiveFloat = 5.0
    cpu_s: PositiveInt = 5
    memory_bytes: PositiveInt = 1 << 29
    output_bytes: PositiveInt = 1 << 16
    file_bytes: PositiveInt = 1 << 24


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program.

    Attributes:
      status: "exit"; "timeout"; "killed" by a signal, such as SIGXCPU; or "flood" for too much output.
      code: exit status, or the negated signal number.
      output, errors: stdout and stderr, up to the limit.
      duration_s: wall time in seconds.
    """

    status: Literal["exit", "timeout", "killed", "flood"]
    code: int
    output: bytes
    errors: bytes
    duration_s: float

    @property
    def succeeded(self) -> bool:
        return self.status == "exit" and self.code == 0


class Sandbox:
    """Runs untrusted Python programs, also concurrently.

    Attributes:
      level: isolation level in use.
      open: gaps found at this level, all of them tolerated by the config.

    Raises:
      SandboxError: no level works, or each leaves a gap that `config.open` does not list; the message names the gaps.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = SandboxConfig() if config is None else config
        self.level, self.open = _chosen(self._config)
        self._hidden: str | None = None
        self._threads = Threads(os.cpu_count() or 1)

    def run(self, program: str, *, stdin: bytes = b"", libraries: bool = False) -> ProgramResult:
        """Runs a Python program until it ends or exceeds a limit; the result describes any end of the program.

        Args:
          program: source of the program.
          stdin: standard input.
          libraries: True lets the program import the packages installed alongside stack.

        Raises:
          SandboxError: the program could not be started, or its user cannot read the libraries.
        """
        if libraries:
            self.check_libraries()
        return _run(self._config, self.level, program, stdin, libraries)

    def check_libraries(self) -> None:
        """Checks, once, that programs can read the installed libraries.

        Raises:
          SandboxError: a folder is not readable; the message lists such folders.
        """
        if self._hidden is None:
            probe = f"import os\nprint(*[each for each in {_libraries()!r} if not os.access(each, os.R_OK | os.X_OK)])"
            # A busy machine may need longer than a program's time limit to start Python.
            limits = dataclasses.replace(self._config, wall_s=max(self._config.wall_s, _PROBE_S))
            result = _run(limits, self.level, probe, b"", libraries=True)
            self._hidden = result.output.decode().strip() if result.succeeded else _last(result.errors)
        if self._hidden:
            raise SandboxError(
                f"Programs in a sandbox of level {self.level!r} cannot read the installed libraries: {self._hidden}. "
                "Let other users read that folder and those above it, or choose another sandbox.level."
            )

    async def run_soon(self, program: str, *, stdin: bytes = b"", libraries: bool = False) -> ProgramResult:
        """Runs a program like `run`, without blocking the event loop."""
        return await self._threads.run(functools.partial(self.run, program, stdin=stdin, libraries=libraries))


def _chosen(settings: SandboxConfig) -> tuple[Level, tuple[Gap, ...]]:
    """Returns the first level whose gaps are all tolerated by the config, and its gaps."""
    levels: Sequence[Level] = (settings.level,) if settings.level else ("bubblewrap", "namespaces", "session")
    reasons = list[str]()
    for level in levels:
        try:
            gaps = _gaps(settings, level)
        except SandboxError as error:
            reasons.append(f"{level}: {error}")
            continue
        if not gaps.keys() - set(settings.open):
            return level, tuple(gaps)
        reasons += [f"{level}: {name} is open: {why}" for name, why in gaps.items() if name not in settings.open]
    listing = "\n  ".join(reasons)
    raise SandboxError(
        f"No sandbox level works on this machine:\n  {listing}\nInstall bubblewrap, or allow user namespaces "
        "(sysctl user.max_user_namespaces), or list the gaps to tolerate: sandbox.open: [...]."
    )


_PROBE = """
import json, os, socket, sys
found = {}
try:
    socket.create_connection(("127.0.0.1", %d), timeout=2).close()
    found["network"] = "the machine's loopback can be reached"
except OSError:
    pass
try:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    found["processes"] = "a fork succeeded"
except OSError:
    pass
if os.access(%r, os.R_OK):
    found["files"] = "files of the machine can be seen"
try:
    for number in range(3):
        with open(f"fill{number}", "wb") as file:
            file.write(bytes(%d))
    found["disk"] = "only the size of each file is limited"
except OSError:
    pass
print(json.dumps(found))
"""


def _gaps(settings: SandboxConfig, level: Level) -> Mapping[Gap, str]:
    """Runs a probe at a level and returns the gaps that it found.

    Raises:
      SandboxError: the level does not work on this machine.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
        Path(file.name).chmod(0o644)  # Readable by all users, so only the sandbox can hide the file.
        # The probe writes three files of half the size limit, which only exceed the limit together.
        probe = _PROBE % (server.getsockname()[1], file.name, settings.file_bytes // 2)
        result = _run(settings, level, probe, b"", libraries=False)
    try:
        return json.loads(result.output)
    except json.JSONDecodeError as error:
        raise SandboxError(f"a first program ended by {result.status} {result.code}: {_last(result.errors)}") from error


def _run(settings: SandboxConfig, level: Level, program: str, stdin: bytes, libraries: bool) -> ProgramResult:
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder, _report() as report:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        source = program.encode(errors="surrogatepass")  # Python itself rejects invalid source
        order = _order(settings, level, len(source), libraries) | {"folder": folder, "report": report.written}
        command, options = _command(settings, level, order, folder)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {"PATH": "/usr/bin:/bin"}
        with subprocess.Popen(
            command,
            **pipes,
            **options,
            cwd=folder,
            env=environment,
            pass_fds=(report.written,),
            start_new_session=True,
        ) as begun:
            child: Any = begun  # type checkers cannot infer binary pipes from options in a mapping
            # With namespaces, the launcher enforces `wall_s`, and this limit only guards against its failure.
            until_s = time.monotonic() + settings.wall_s + (_GRACE_S if level == "namespaces" else 0)
            try:
                output, errors, status = _exchange(
                    child, json.dumps(order).encode() + b"\n" + source + stdin, settings, until_s
                )
                status = status or _awaited(child, until_s)
            finally:
                _end(child)
            code = child.wait()
        said = report.read()
    if said.startswith("refused: "):
        raise SandboxError(said.removeprefix("refused: "))
    # Bubblewrap reports a program killed by signal n as status 128 + n.
    status = status or ("timeout" if said == "timeout" else "killed" if code < 0 or code > 128 else "exit")
    return ProgramResult(status, code, output, errors, time.monotonic() - started_s)


@dataclass
class _Report:
    """A pipe for messages of the launcher, which the program does not inherit."""

    ends: tuple[int, int]

    @property
    def written(self) -> int:
        return self.ends[1]

    def read(self) -> str:
        os.set_blocking(self.ends[0], False)
        try:
            return os.read(self.ends[0], _READ_BYTES).decode(errors="replace")
        except BlockingIOError:
            return ""


@contextlib.contextmanager
def _report() -> Iterator[_Report]:
    report = _Report(os.pipe())
    try:
        yield report
    finally:
        for end in report.ends:
            os.close(end)


def _libraries() -> list[str]:
    """Returns the folders of installed packages."""
    user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    return [str(Path(each).resolve()) for each in (*site.getsitepackages(), *user) if Path(each).is_dir()]


def _order(settings: SandboxConfig, level: Level, program_bytes: int, libraries: bool) -> dict[str, Any]:
    """Returns the launcher's order, except for the folder and the report descriptor."""
    folders = _libraries() if libraries else []
    return {
        "level": "namespaces" if level == "namespaces" else "session",
        "program_bytes": program_bytes,
        "python": str(Path(sys.executable).resolve()),
        "paths": [str(Path(sys.base_prefix).resolve()), *folders],
        "libraries": folders,
        "wall_s": settings.wall_s,
        "files_bytes": settings.file_bytes,
        "limits": {
            "RLIMIT_CPU": settings.cpu_s,
            "RLIMIT_AS": settings.memory_bytes,
            "RLIMIT_FSIZE": settings.file_bytes,
            "RLIMIT_NPROC": 1,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        },
    }


def _command(
    settings: SandboxConfig, level: Level, order: dict[str, Any], folder: str
) -> tuple[list[str], dict[str, Any]]:
    """Returns the command and its user; updates the folder in `order` to the path inside bubblewrap.

    Raises:
      SandboxError: bubblewrap is not installed.
    """
    # -I ignores environment variables and the user's packages, -S skips `site`, -B writes no bytecode.
    launch = [order["python"], "-I", "-S", "-B", str(_LAUNCHER)]
    if level != "bubblewrap":
        return launch, {}
    if (found := shutil.which("bwrap")) is None:
        raise SandboxError("bwrap is not installed")
    order["folder"] = "/tmp"  # path in the program's private file system
    shown = [*SHOWN, *order["paths"], str(_LAUNCHER)]
    binds = [part for path in shown for part in ("--ro-bind-try", path, path)]
    devices = [part for path in DEVICES for part in ("--dev-bind-try", path, path)]
    alone = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    room = ["--size", str(settings.file_bytes), "--tmpfs", "/tmp"]
    # The process limit does not apply to root.
    user = {"user": NOBODY, "group": NOBODY, "extra_groups": ()} if os.geteuid() == 0 else {}
    # /tmp is mounted first, because some of the paths may be below the machine's /tmp.
    return [found, *alone, *room, *binds, *devices, "--chdir", "/tmp", "--", *launch], user


def _exchange(
    child: "subprocess.Popen[bytes]", stdin: bytes, settings: SandboxConfig, until_s: float
) -> tuple[bytes, bytes, Literal["timeout", "flood"] | None]:
    """Writes to a child and reads from it, up to its output and time limits."""
    assert child.stdin is not None and child.stdout is not None and child.stderr is not None
    found = {child.stdout.fileno(): bytearray(), child.stderr.fileno(): bytearray()}
    left, status = memoryview(stdin), None
    # No blocking writes: the child may fill its output pipes before it has read all of its input.
    os.set_blocking(child.stdin.fileno(), False)
    with selectors.DefaultSelector() as selector:
        for each in found:
            selector.register(each, selectors.EVENT_READ)
        selector.register(child.stdin, selectors.EVENT_WRITE)
        while selector.get_map() and status is None:
            ready = selector.select(max(0.0, until_s - time.monotonic()))
            status = None if ready else "timeout"
            for key, _ in ready:
                if key.fileobj is child.stdin:
                    left = _written(child.stdin, left)
                    if not left:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                    continue
                part = os.read(key.fd, _READ_BYTES)
                found[key.fd] += part
                if not part:
                    selector.unregister(key.fd)
                if len(found[key.fd]) > settings.output_bytes:
                    status = "flood"
    output, errors = (bytes(each[: settings.output_bytes]) for each in found.values())
    return output, errors, status


def _written(pipe: IO[bytes], left: memoryview) -> memoryview:
    """Writes once and returns the remaining bytes; empty if the reader has closed the pipe."""
    try:
        return left[os.write(pipe.fileno(), left) :]
    except BrokenPipeError:
        return left[:0]


def _awaited(child: "subprocess.Popen[bytes]", until_s: float) -> Literal["timeout"] | None:
    """Waits until a child that has closed its outputs exits."""
    try:
        child.wait(timeout=max(0.0, until_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "timeout"
    return None


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Terminates the launcher, which kills the program, and then kills the rest of the session."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_GRACE_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # `start_new_session` made the child the leader of its process group, so the group has its number.
        os.killpg(child.pid, signal.SIGKILL)


def _last(errors: bytes) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
