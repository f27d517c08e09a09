"""`gated_linear_unit` on processors with AMX: its two products and what is made of them in one kernel."""

import functools
from collections.abc import Sequence
from typing import Any

from stack_core.abi import AUTODIFF, OpCall, OpImplementation
from stack_core.hardware import Chip
from stack_kernels.gated_linear_unit.cpu import GatedProducts, gated_linear_unit
from stack_kernels.gated_linear_unit.llvm_gate import gate_gradients
from stack_kernels.linear.amx import TILED, run, supports_tiles
from stack_kernels.linear.amx_product import TiledProduct
from stack_kernels.llvm.activations import ACTIVATIONS

__all__ = ["AMX"]


def _supports(call: OpCall, chip: Chip) -> bool | str:
    activation = call.options["activation"]
    if activation not in ACTIVATIONS:
        return f"it computes {', '.join(ACTIVATIONS)}, and not {activation}"
    return supports_tiles(call, chip, weights=("w_gate", "w_up"), rows="x")


def _gated(activation: str, rows: Any, w_gate: Any, w_up: Any, keeps_products: bool) -> Sequence[Any]:
    return run(TiledProduct(activation=activation, keeps_products=keeps_products), rows, w_gate, w_up)


AMX = OpImplementation(
    op="gated_linear_unit",
    name="amx",
    function=functools.partial(gated_linear_unit, GatedProducts(_gated, TILED, gate_gradients)),
    supports=_supports,
    vjp=AUTODIFF,
    priority=4,
)
