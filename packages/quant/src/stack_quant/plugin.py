"""What stack-quant registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0


@hookimpl
def stack_register_array_types(registry: Registrar) -> None:
    registry.add("qarray", "stack_quant.qarray:QArray")
