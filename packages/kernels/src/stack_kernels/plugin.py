"""The plugin of stack-kernels: op implementations, tuned tables and commands."""

from stack_core.abi.hookspecs import hookimpl
from stack_core.abi.registry import Registrar

STACK_ABI_MINOR = 0

# One line per implementation: "op/implementation" and its attribute in stack_kernels.
_OPS: dict[str, str] = {
    "attention/cudnn": "attention.cudnn:CUDNN",
    "attention/splash": "attention.splash:SPLASH",
    "attention/tokamax": "attention.tokamax:TOKAMAX",
    "attention/xla_cpu": "attention.xla_cpu:XLA_CPU",
    "exchange/ragged_all_to_all": "exchange.ragged_all_to_all:RAGGED_ALL_TO_ALL",
    "gated_linear_unit/jit_amx": "jit_cpu.gated_linear_unit.jit_amx:JIT_AMX",
    "gated_linear_unit/jit_x86": "jit_cpu.gated_linear_unit.jit_x86:JIT_X86",
    "gated_linear_unit/tokamax": "gated_linear_unit.tokamax:TOKAMAX",
    "gated_linear_unit/triton_gpu": "gated_linear_unit.triton_gpu:TRITON_GPU",
    "gated_linear_unit/xla_cpu": "gated_linear_unit.xla_cpu:XLA_CPU",
    "gated_linear_unit/xla_cpu_quantized": "gated_linear_unit.xla_cpu_quantized:XLA_CPU_QUANTIZED",
    "linear/jit_amx": "jit_cpu.linear.jit_amx:JIT_AMX",
    "linear/jit_x86": "jit_cpu.linear.jit_x86:JIT_X86",
    "linear/mosaic_gpu": "linear.mosaic_gpu:MOSAIC_GPU",
    "linear/mosaic_tpu": "linear.mosaic_tpu:MOSAIC_TPU",
    "linear/triton_gpu": "linear.triton_gpu:TRITON_GPU",
    "linear/xla_cpu": "linear.xla_cpu:XLA_CPU",
    "linear/xla_cpu_quantized": "linear.xla_cpu_quantized:XLA_CPU_QUANTIZED",
    "linear_attention/xla_cpu": "linear_attention.xla_cpu:XLA_CPU",
    "linear_cross_entropy/jit_amx": "jit_cpu.linear_cross_entropy.jit_amx:JIT_AMX",
    "linear_cross_entropy/tokamax": "linear_cross_entropy.tokamax:TOKAMAX",
    "linear_cross_entropy/xla_cpu": "linear_cross_entropy.xla_cpu:XLA_CPU",
    "norm/jit_x86": "jit_cpu.norm.jit_x86:JIT_X86",
    "norm/mosaic_tpu": "norm.mosaic_tpu:MOSAIC_TPU",
    "norm/tokamax_triton": "norm.tokamax_triton:TOKAMAX_TRITON",
    "paged_attention/jit_x86": "jit_cpu.paged_attention.jit_x86:JIT_X86",
    "paged_attention/mosaic_tpu": "paged_attention.mosaic_tpu:MOSAIC_TPU",
    "paged_attention/ragged": "paged_attention.ragged:RAGGED",
    "paged_attention/triton_gpu": "paged_attention.triton_gpu:TRITON_GPU",
    "paged_attention/xla_cpu": "paged_attention.xla_cpu:XLA_CPU",
    "ragged_dot/megablox": "ragged_dot.megablox:MEGABLOX",
    "ragged_dot/tokamax_mosaic_gpu": "ragged_dot.tokamax:TOKAMAX_MOSAIC_GPU",
    "ragged_dot/tokamax_triton": "ragged_dot.tokamax:TOKAMAX_TRITON",
    "ragged_dot/tokamax_v1": "ragged_dot.tokamax:TOKAMAX_TPU_V1",
    "ragged_dot/tokamax_v2": "ragged_dot.tokamax:TOKAMAX_TPU_V2",
    "ragged_dot/xla_cpu": "ragged_dot.xla_cpu:XLA_CPU",
    "ring_attention/blocks": "ring_attention.blocks:BLOCKS",
    "rope/jit_x86": "jit_cpu.rope.jit_x86:JIT_X86",
    "rope/xla_cpu": "rope.xla_cpu:XLA_CPU",
}


@hookimpl
def stack_register_ops(registry: Registrar) -> None:
    for name, target in _OPS.items():
        registry.add(name, f"stack_kernels.{target}")


@hookimpl
def stack_register_tuned_tables(registry: Registrar) -> None:
    registry.add("measured", "stack_kernels.tuning.sources:MEASURED")
    registry.add("published", "stack_kernels.tuning.published:PUBLISHED")


@hookimpl
def stack_register_checks(registry: Registrar) -> None:
    registry.add("kernels", "stack_kernels.checks:check_kernels", variables=("STACK_CPU_KERNELS", "STACK_TUNED_TABLES"))


@hookimpl
def stack_register_commands(registry: Registrar) -> None:
    registry.add(
        "tune",
        "stack_kernels.commands.tune:tune",
        help="Choose a function's ops by measurement.",
        # XLA's CPU client takes memory from the C library at each call; in pages of 4 KiB a step could take twice
        # as long.
        huge_pages=True,
    )
    registry.add(
        "bench ops",
        "stack_kernels.commands.bench_ops:bench_ops",
        help="Measure ops; compare with a baseline.",
        huge_pages=True,
    )
    registry.add(
        "bench burn-in",
        "stack_kernels.commands.burn_in:burn_in",
        help="Try every kernel on a new chip: contracts, tuning, speeds, a profile.",
        huge_pages=True,
    )
    registry.add(
        "bench compile",
        "stack_kernels.commands.bench_compile:bench_compile",
        help="Compile ops for absent chips.",
    )
