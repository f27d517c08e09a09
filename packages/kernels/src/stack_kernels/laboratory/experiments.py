"""Compiles implementations for chips that are not there, a process for each chip."""

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
    """What came of one direction of one call of an implementation on one chip.

    Attributes:
      name: "attention/splash".
      direction: "forward", or "gradient": value and gradient.
      status: "compiled"; "refused", by `supports`; "failed", by a compiler or for want of a kernel in the program.
      reason: of what was refused or failed.
      compile_s: to trace, lower and compile.
      temporary_bytes: of the program's buffers beside arguments and results.
      kernels: and what follows, as `programs.Usage` has them.
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
    chip: str, names: Sequence[str], *, timeout_s: float = 1800.0, told: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """Compiles the laboratory's calls of implementations for a chip.

    A compiler that ends its process costs the implementation that it was compiling, and no other.

    Args:
      names: "op/implementation".
      timeout_s: of a process.
      told: is handed each row as it comes.
    """
    rows: list[Row] = []
    left = list(names)
    while left:
        process = _Process(chip, left, timeout_s)
        for row in process.rows():
            rows.append(row)
            told(row)
        if process.failure is None:
            break
        unfinished = process.started or Row(left[0], chip, "", "forward")
        rows.append(dataclasses.replace(unfinished, reason=process.failure))
        told(rows[-1])
        left = left[left.index(unfinished.name) + 1 :]
    return rows


@dataclass
class _Process:
    """A process that compiles; once its rows are read, why it ended before it was through and with what."""

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
                    if line.endswith("\n"):  # the last of a process that was ended may be torn
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
    """Of the process that compiles: it has no devices, keeps no programs, and takes ptxas from the wheel."""
    return {
        **os.environ,
        "PATH": path_with_wheel_compilers(),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
