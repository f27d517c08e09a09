"""Compiles implementations for chips that are not attached, in one process per chip."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stack_core.chips.wheel_compilers import path_with_wheel_compilers

__all__ = ["Row", "compile_for"]


@dataclass(frozen=True)
class Row:
    """Result of one direction of one call of an implementation on one chip.

    Attributes:
      name: "attention/splash".
      chip: name of the chip.
      call: name of the call.
      direction: "forward", or "gradient" for value and gradient.
      status: "compiled"; "refused" by `supports`; "failed" in a compiler, or because the program calls no kernel.
      reason: reason of a refusal or failure.
      compile_s: seconds to trace, lower and compile.
      temporary_bytes: bytes of the program's buffers other than arguments and results.
      kernels: as in `programs.Usage`.
      vector_memory_bytes: as in `programs.Usage`.
      registers: as in `programs.Usage`.
      spilled_bytes: as in `programs.Usage`.
      shared_bytes: as in `programs.Usage`.
    """

    name: str
    chip: str
    call: str
    direction: str
    status: str = "failed"
    reason: str | None = None
    compile_s: float | None = None
    temporary_bytes: int | None = None
    kernels: Mapping[str, int] = field(default_factory=dict)
    vector_memory_bytes: int | None = None
    registers: int | None = None
    spilled_bytes: int | None = None
    shared_bytes: int | None = None


def compile_for(
    chip: str, names: Sequence[str], *, timeout_s: float = 1800.0, on_row: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Compiles the laboratory's calls of implementations for a chip.

    If a compiler crashes its process, only the implementation that it was compiling is lost.

    Args:
      chip: name of the chip.
      names: "op/implementation".
      timeout_s: time limit of a process.
      on_row: called with each row as it arrives.
    """
    rows: list[Row] = []
    left = list(names)
    while left:
        process = _Process(chip, left, timeout_s)
        for row in process.rows():
            rows.append(row)
            on_row(row)
        if process.failure is None:
            break
        unfinished = process.started or Row(left[0], chip, "", "forward")
        rows.append(dataclasses.replace(unfinished, reason=process.failure))
        on_row(rows[-1])
        # Without the implementation whose compiler ended the process.
        left = left[left.index(unfinished.name) + 1 :]
    return rows


@dataclass
class _Process:
    """A compiling process.

    After its rows are read, `failure` is the reason of an early end and `started` the row in progress.
    """

    chip: str
    names: Sequence[str]
    timeout_s: float
    started: Row | None = None
    failure: str | None = None

    def rows(self) -> Iterator[Row]:
        command = [sys.executable, "-m", "stack_kernels.laboratory.worker", self.chip, *self.names]
        with (
            tempfile.TemporaryFile("w+", errors="replace") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment()) as child,
        ):
            stopping = threading.Timer(self.timeout_s, child.kill)
            stopping.start()
            try:
                assert child.stdout is not None
                for line in child.stdout:
                    if line.endswith("\n"):  # the last line of a killed process may be incomplete
                        yield from self._read(json.loads(line))
                status = child.wait()
            finally:
                stopping.cancel()
                child.kill()
            if status:
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:]
                self.failure = f"the process that compiled ended with status {status}: {''.join(last)[:300]}"

    def _read(self, line: Mapping[str, Any]) -> Iterator[Row]:
        if "starts" in line:
            self.started = Row(**line["starts"])
        else:
            self.started = None
            yield Row(**line["row"])


def _environment() -> dict[str, str]:
    """Environment of the compiling process: no devices, no compilation cache, and ptxas from the wheel."""
    return {
        **os.environ,
        "PATH": path_with_wheel_compilers(),
        "JAX_PLATFORMS": "cpu",
        # With a cached program, compilers print neither registers nor spills.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
