"""The exceptions of stack-quant. Invalid arguments raise the exceptions of stack-core.

stack_core.abi.errors.StackError
└── QuantError
    └── RuleError    a rule that contradicts itself or matches nothing

The command line prints their messages without a traceback and exits with status 2.
"""

from stack_core.abi.errors import StackError

__all__ = ["QuantError", "RuleError"]


class QuantError(StackError):
    """A model or checkpoint that cannot be quantized, or that is not quantized as expected."""


class RuleError(QuantError):
    """A rule that contradicts itself, matches nothing or quantizes nothing."""
