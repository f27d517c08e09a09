"""What stack-core registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0

_OPS = ("attention", "gated_linear_unit", "linear", "linear_cross_entropy", "norm", "rope")


@hookimpl
def stack_register_ops(registry: Registrar) -> None:
    for op in _OPS:
        registry.add(f"{op}/reference", f"stack_core.ops._{op}:REFERENCE")


@hookimpl
def stack_register_chips(registry: Registrar) -> None:
    registry.add("cpu", "stack_core.hardware.measure:measured_cpu")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add("plugins", "stack_core.commands.plugins:plugins", help="List plugins and what they register.")
