"""What stack-kernels registers."""

from stack_core.hookspecs import hookimpl
from stack_core.registry import Registrar

STACK_ABI_MINOR = 0

# One line an implementation: "op/implementation", and the attribute of stack_kernels that holds it.
_OPS: dict[str, str] = {
    "attention/cpu": "attention.cpu:CPU",
    "gated_linear_unit/amx": "gated_linear_unit.amx:AMX",
    "gated_linear_unit/cpu": "gated_linear_unit.cpu:CPU",
    "gated_linear_unit/cpu_quantized": "gated_linear_unit.cpu_quantized:CPU_QUANTIZED",
    "gated_linear_unit/llvm": "gated_linear_unit.llvm:LLVM",
    "gated_linear_unit/llvm_wide": "gated_linear_unit.llvm_wide:LLVM_WIDE",
    "linear/amx": "linear.amx:AMX",
    "linear/cpu": "linear.cpu:CPU",
    "linear/cpu_quantized": "linear.cpu_quantized:CPU_QUANTIZED",
    "linear/llvm": "linear.llvm:LLVM",
    "linear_attention/cpu": "linear_attention.cpu:CPU",
    "linear_cross_entropy/amx": "linear_cross_entropy.amx:AMX",
    "linear_cross_entropy/cpu": "linear_cross_entropy.cpu:CPU",
    "norm/llvm": "norm.llvm:LLVM",
    "paged_attention/cpu": "paged_attention.cpu:CPU",
    "paged_attention/llvm": "paged_attention.llvm:LLVM",
    "ragged_dot/cpu": "ragged_dot.cpu:CPU",
    "rope/cpu": "rope.cpu:CPU",
    "rope/llvm": "rope.llvm:LLVM",
}


@hookimpl
def stack_register_ops(registry: Registrar) -> None:
    for name, target in _OPS.items():
        registry.add(name, f"stack_kernels.{target}")


@hookimpl
def stack_register_tuned_tables(registry: Registrar) -> None:
    registry.add("measured", "stack_kernels.tuning.sources:MEASURED")


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "tune",
        "stack_kernels.commands.tune:tune",
        help="Choose a function's ops by measurement.",
        huge_pages=True,
    )
    registry.add(
        "bench ops",
        "stack_kernels.commands.bench_ops:bench_ops",
        help="Measure ops; compare with a baseline.",
        huge_pages=True,
    )
