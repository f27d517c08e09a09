"""`gated_linear_unit` on GPUs with quantized weights and few rows: two products of `linear/triton_gpu`."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import forward_only, gate_product, is_quantized, vary_alike
from stack_kernels.linear.triton_gpu import CodeTile, quantized_rows, reasons_against, tiles_of
from stack_kernels.supports import first_problem, is_beyond

__all__ = ["TRITON_GPU", "triton_gpu"]

_WEIGHTS = ("w_gate", "w_up")


def triton_gpu(*, interpret: bool = False) -> OpImplementation:
    """Builds the implementation.

    Args:
      interpret: True interprets the kernel on any device.
    """
    return OpImplementation(
        "gated_linear_unit",
        "triton_gpu",
        forward_only(lambda **call: _gated(**call, interpret=interpret)),
        platforms=("gpu",),
        supports=_supports,
        default=lambda call, chip: next(_space(call, chip), None),
        space=_space,
        is_opaque=True,
    )


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    if plain := [name for name in _WEIGHTS if not is_quantized(call.arrays[name])]:
        return f"{' and '.join(plain)} is not quantized"
    problems = dict[str, bool]()
    for name in _WEIGHTS:
        found = reasons_against(call.arrays["x"], call.arrays[name])
        problems |= {f"{name}: {reason}": applies for reason, applies in found.items()}
    if not any(problems.values()):
        problems["no tile divides both weights"] = not any(_space(call, chip))
        problems[f"{config} does not fit the call"] = is_beyond(config, _space(call, chip))
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[CodeTile]:
    gate, up = (call.arrays[name] for name in _WEIGHTS)
    of_up = frozenset(tiles_of(up))
    yield from (tile for tile in tiles_of(gate) if tile in of_up)


def _gated(
    x: Any, w_gate: Any, w_up: Any, *, bias_gate: Any, bias_up: Any, config: CodeTile, interpret: bool, **options: Any
) -> jax.Array:
    rows, w_gate, w_up = vary_alike(x.reshape(-1, x.shape[-1]), w_gate, w_up)

    def affine(weight: Any, bias: Any) -> jax.Array:
        result = quantized_rows(rows, weight.__stack_qview__(), config, interpret=interpret)
        return (result if bias is None else result + bias.astype(jnp.float32)).astype(x.dtype)

    gated = gate_product(affine(w_gate, bias_gate), affine(w_up, bias_up), **options)
    return gated.reshape(*x.shape[:-1], gated.shape[-1])


TRITON_GPU = triton_gpu()
