"""The calls of the contracts for accelerators that each kernel supports on each chip, as a table of the page.

    python -m stack_kernels.laboratory.covering docs/accelerators.md            # writes the table
    python -m stack_kernels.laboratory.covering docs/accelerators.md --check    # fails if it is out of date

Only `supports` is evaluated, which needs neither a chip nor a compiler.
"""

import argparse
import contextlib
import dataclasses
import functools
import unittest
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stack_core.abi.ops import OpCall
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.ops.building import answer, implementations_of
from stack_core.testing import accelerator_checks
from stack_kernels.laboratory.table import CHIPS, implementations
from stack_kernels.laboratory.without_cudnn import pretend_cudnn
from stack_kernels.laboratory.without_tokamax import pretend_tokamax

__all__ = ["Covered", "accelerator_kernels", "count_covered", "main", "table"]

_BEGIN, _END = "<!-- covering calls: begin -->\n", "<!-- covering calls: end -->\n"


@dataclass(frozen=True)
class Covered:
    """Numbers of an op's calls for accelerators.

    Attributes:
      calls: calls in bf16 and fp16, among them empty calls, which reach no implementation.
      forward: calls that the implementation supports.
      gradients: calls whose backward pass it supports after its own forward pass.
    """

    calls: int
    forward: int
    gradients: int


def accelerator_kernels() -> list[str]:
    """Lists the implementations "op/name" for TPUs or GPUs."""
    found = (name for name in implementations() if not name.endswith("/reference"))
    return [name for name in found if "cpu" not in (registries.ops[name].platforms or ("cpu",))]


def count_covered(name: str, chip: str) -> Covered:
    """Counts the calls of the op's contract for accelerators that an implementation, "op/name", supports on a chip."""
    op, _, own = name.partition("/")
    found, forward, gradients = implementations_of(op)[own], 0, 0
    with use_chip(registries.chips[chip]), pretend_cudnn(), pretend_tokamax():
        for call in _calls(op):
            if answer(found, call) is not True:
                continue
            forward += 1
            behind = dataclasses.replace(call, direction="backward", forward=own, residuals=found.residuals)
            gradients += found.backward is not None and answer(found, behind) is True
    return Covered(len(_calls(op)), forward, gradients)


@functools.cache
def _calls(op: str) -> tuple[OpCall, ...]:
    return tuple(_found(op))


def _found(op: str) -> Iterator[OpCall]:
    for check in accelerator_checks(op):
        with contextlib.suppress(unittest.SkipTest):
            yield check.seen(check.aspect)


@functools.cache
def table() -> str:
    """Formats one row per kernel: supported/all calls, and in brackets the supported gradients if they are fewer."""
    lines = [_line("", *CHIPS), _line(*["---"] * (1 + len(CHIPS)))]
    lines += [
        _line(f"`{name}`", *(_cell(count_covered(name, chip)) for chip in CHIPS)) for name in accelerator_kernels()
    ]
    return "\n".join(lines)


def _cell(covered: Covered) -> str:
    if not covered.forward:
        return "0"
    fewer = "" if covered.gradients == covered.forward else f" ({covered.gradients})"
    return f"{covered.forward}/{covered.calls}{fewer}"


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Writes or checks the table of a page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    text = arguments.page.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    expected = f"{before}{_BEGIN}{table()}\n{_END}{after}"
    if not arguments.check:
        arguments.page.write_text(expected, encoding="utf-8")
    elif text != expected:
        raise SystemExit(f"{arguments.page} is out of date: python -m {__spec__.name} {arguments.page}")


if __name__ == "__main__":
    main()
