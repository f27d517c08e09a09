"""`gated_linear_unit` on processors with AMX: both products and the gate in one kernel."""

import functools
from collections.abc import Sequence
from typing import Any

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import as_backward
from stack_kernels.gated_linear_unit.xla_cpu import GatedProducts, gated_gradients, gated_linear_unit, is_plain
from stack_kernels.jit_cpu.activations import ACTIVATIONS
from stack_kernels.jit_cpu.gated_linear_unit.gate import gate_gradients
from stack_kernels.jit_cpu.linear.jit_amx import TILED, run, supports_tiles
from stack_kernels.jit_cpu.linear.tiled_product import TiledProduct

__all__ = ["JIT_AMX"]


def _supports(call: OpCall, chip: Chip, config: Any) -> bool | str:
    activation, plain = call.options["activation"], is_plain(call)
    if plain is not True:
        return plain
    if activation not in ACTIVATIONS:
        return f"it computes {', '.join(ACTIVATIONS)}, and not {activation}"
    return supports_tiles(call, chip, weights=("w_gate", "w_up"), rows="x")


def _gated(activation: str, rows: Any, w_gate: Any, w_up: Any, keeps_products: bool) -> Sequence[Any]:
    return run(TiledProduct(activation=activation, keeps_products=keeps_products), rows, w_gate, w_up)


_TILED = GatedProducts(_gated, TILED, gate_gradients)

JIT_AMX = OpImplementation(
    op="gated_linear_unit",
    name="jit_amx",
    forward=functools.partial(gated_linear_unit, _TILED),
    backward=as_backward(functools.partial(gated_gradients, _TILED)),
    platforms=("cpu",),
    supports=_supports,
    residuals=("gate", "up"),
    is_opaque=True,
    exports=False,
    # Before `jit_x86`, which also takes 7 and 8 rows of bf16.
    priority=4,
)
