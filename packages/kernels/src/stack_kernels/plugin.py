"""What stack-kernels registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0

# One line an implementation: "op/implementation", and the attribute of stack_kernels that holds it.
_OPS: dict[str, str] = {}


@hookimpl
def stack_register_ops(registry: Registrar) -> None:
    for name, target in _OPS.items():
        registry.add(name, f"stack_kernels.{target}")
