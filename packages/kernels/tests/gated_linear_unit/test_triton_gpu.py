"""Two quantized products of few rows, interpreted; `linear/test_triton_gpu.py` compiles them."""

import jax
import jax.numpy as jnp
import pytest

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.testing import OpCheck, Quantized, accelerator_checks
from stack_kernels.gated_linear_unit.triton_gpu import triton_gpu
from stack_kernels.linear.triton_gpu import CodeTile

A100 = registries.chips["a100-80gb"]
_QUICK = ("tiles_int8_by_tile_and_biases-bfloat16",)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=str(check), marks=() if str(check) in _QUICK else pytest.mark.slow)
        for check in accelerator_checks("gated_linear_unit")
        if "int" in check.case.name
    ],
)
def test_contract(check: OpCheck) -> None:
    with use_chip(A100):
        check(triton_gpu(interpret=True))


def weight(d_in: int, tiles: int) -> Quantized:
    return Quantized(jax.ShapeDtypeStruct((d_in, 64), jnp.int8), jax.ShapeDtypeStruct((tiles, 64), jnp.float32))


def test_the_tile_divides_both_weights() -> None:
    x = jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    (call,) = ops.explain(ops.gated_linear_unit, x, weight(256, 1), weight(256, 8), chip=A100)
    assert call.forward.config == CodeTile(32, 64, 8)
    (call,) = ops.explain(ops.gated_linear_unit, x, weight(256, 1), weight(256, 16), chip=A100)
    refusal = dict(call.forward.refused)["triton_gpu"]
    assert refusal == "w_up: codes of a column that share a scale are a multiple of 32"
