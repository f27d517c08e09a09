"""The parts of an op that a plugin defines; `docs/hooks.md` has an example."""

from stack_core.ops._check import (
    Axes,
    check_floating,
    check_integer,
    check_known,
    check_positive,
    check_same_dtype,
)
from stack_core.ops._dispatch import dispatch
from stack_core.ops._op import Op, OpAxes, function_of, op_named, suite_of
from stack_core.ops._request import Implementation
from stack_core.ops._splitting import LogicalNames

__all__ = [
    "Axes",
    "Implementation",
    "LogicalNames",
    "Op",
    "OpAxes",
    "check_floating",
    "check_integer",
    "check_known",
    "check_positive",
    "check_same_dtype",
    "dispatch",
    "function_of",
    "op_named",
    "suite_of",
]
