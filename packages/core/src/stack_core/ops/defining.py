"""Building blocks for plugins that define new ops; see `docs/hooks.md` for an example."""

from stack_core.ops.dispatch.check import (
    Axes,
    check_floating,
    check_integer,
    check_known,
    check_positive,
    check_same_dtype,
)
from stack_core.ops.dispatch.dispatch import dispatch
from stack_core.ops.dispatch.op import Op, OpAxes, function_of, op_named, suite_of
from stack_core.ops.dispatch.request import Implementation
from stack_core.ops.dispatch.splitting import LogicalNames

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
