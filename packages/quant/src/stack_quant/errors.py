"""Every exception that a user of stack-quant can cause, beside those of core's that its arguments raise.

stack_core.abi.errors.StackError
└── QuantError
    └── RuleError    a rule that contradicts itself, or that nothing matches

The command line prints their messages without a traceback and exits with status 2.
"""

from stack_core.abi.errors import StackError

__all__ = ["QuantError", "RuleError"]


class QuantError(StackError):
    """What cannot be quantized, or was not."""


class RuleError(QuantError):
    """A rule that contradicts itself, or that nothing matches."""
