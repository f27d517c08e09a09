"""What programs that rewrite jaxprs need: calls of ops as single equations of a jaxpr."""

from stack_core.ops.dispatch.op_units import OpUnit, as_units, unit_of

__all__ = ["OpUnit", "as_units", "unit_of"]
