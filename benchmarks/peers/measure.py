"""Measures a training process from outside, with the same instrument for every peer.

A peer needs to do no more than write one line as each step completes. Time is taken when the line appears; CPU time and
memory come from the kernel's accounting of the process and all that it started (Linux's `/proc`). What a trainer does
after its last step (saving, evaluating) is not measured: it is killed then.
"""

import contextlib
import itertools
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.peer import Command

__all__ = ["Measurement", "PeerFailed", "measure", "tree_usage"]

_POLL_S = 0.02
_SILENCE_S = 600.0
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": ""}  # an empty value counts as none
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/PID/stat, counted from the one after the command's name; see proc(5).
_CPU_TICKS = slice(11, 15)
_RSS_PAGES = 21


class PeerFailed(RuntimeError):
    """A trainer ended, or fell silent, before its last step."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of one trainer, import to last step.

    Attributes:
      completed_s: wall time from the start of the process to the completion of each step.
      cpu_s: CPU time (user and system, all processes) spent until then.
      peak_rss_bytes: the most resident memory at one time, summed over all processes.
    """

    completed_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    peak_rss_bytes: int

    def figures(self, *, warmup_steps: int, step_tokens: int) -> dict[str, float]:
        """The figures to compare; those of a step are medians over the steps after the first `warmup_steps`."""
        step_s = _median_difference(self.completed_s[warmup_steps - 1 :])
        step_cpu_s = _median_difference(self.cpu_s[warmup_steps - 1 :])
        return {
            "tokens_per_s": step_tokens / step_s,
            "step_s": step_s,
            "step_cpu_s": step_cpu_s,
            "first_step_s": self.completed_s[0],
            "first_step_cpu_s": self.cpu_s[0],
            "startup_cpu_s": self.cpu_s[0] - step_cpu_s,
            "peak_rss_bytes": self.peak_rss_bytes,
        }


def measure(command: Command, *, steps: int, folder: Path) -> Measurement:
    """Runs `command` in `folder`, which is empty, until it has completed `steps` steps.

    Raises:
      PeerFailed: it did not get that far; with the end of its output.
    """
    output = folder / "output.log"
    with output.open("wb") as sink:
        started_s = time.monotonic()
        process = subprocess.Popen(
            command.arguments,
            cwd=folder,
            env={**os.environ, **_ENVIRONMENT, **command.environment},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        lines = _Follower(folder / command.log if command.log else output, re.compile(command.step_line))
        completed, peak_bytes = _observe(process, lines, steps, started_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        _, process.returncode, usage = os.wait4(process.pid, 0)
    if len(completed) < steps:
        tail = output.read_text(encoding="utf-8", errors="replace")[-4000:]
        raise PeerFailed(f"{len(completed)} of {steps} steps completed; the end of the output:\n{tail}")
    return Measurement(
        completed_s=tuple(wall_s for wall_s, _ in completed),
        cpu_s=tuple(cpu_s for _, cpu_s in completed),
        peak_rss_bytes=max(peak_bytes, usage.ru_maxrss * 1024),
    )


def tree_usage(root: int) -> tuple[float, int]:
    """CPU seconds that a process and its living descendants have used, and their resident bytes."""
    tree = list(_tree(root))
    ticks = sum(int(count) for fields in tree for count in fields[_CPU_TICKS])
    return ticks / _TICKS_PER_S, sum(int(fields[_RSS_PAGES]) for fields in tree) * _PAGE_BYTES


def _observe(
    process: subprocess.Popen[bytes], lines: "_Follower", steps: int, started_s: float
) -> tuple[list[tuple[float, float]], int]:
    """The (wall, CPU) seconds of each completed step, and the peak of resident bytes."""
    completed: list[tuple[float, float]] = []
    peak_bytes = 0
    last_s = started_s
    while len(completed) < steps and time.monotonic() - last_s < _SILENCE_S:
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            break
        time.sleep(_POLL_S)
        cpu_s, rss_bytes = tree_usage(process.pid)
        peak_bytes = max(peak_bytes, rss_bytes)
        for _ in range(lines.new_matches()):
            last_s = time.monotonic()
            completed.append((last_s - started_s, cpu_s))
    return completed[:steps], peak_bytes


class _Follower:
    """Counts matching lines as they are added to a file, which may not exist yet."""

    def __init__(self, path: Path, pattern: re.Pattern[str]) -> None:
        self._path = path
        self._pattern = pattern
        self._read_bytes = 0

    def new_matches(self) -> int:
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                text, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return 0
        self._read_bytes += len(text) + len(newline)
        return sum(bool(self._pattern.search(line)) for line in text.decode(errors="replace").splitlines())


def _tree(root: int) -> Iterator[list[str]]:
    """Yields the accounting of `root` and its living descendants; a parent's includes its dead children's CPU time."""
    waiting = [root]
    while waiting:
        folder = Path("/proc", str(waiting.pop()))
        try:
            stat = (folder / "stat").read_text()
            children = [(task / "children").read_text() for task in (folder / "task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        yield stat.rpartition(")")[2].split()
        waiting += [int(child) for line in children for child in line.split()]


def _median_difference(values: tuple[float, ...]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(values))
