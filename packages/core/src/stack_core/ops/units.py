"""Op calls as single jaxpr equations, for programs that rewrite jaxprs."""

from stack_core.ops.dispatch.op_units import OpUnit, as_units, unit_of

__all__ = ["OpUnit", "as_units", "unit_of"]
