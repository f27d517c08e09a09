from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.errors import UnsupportedOp
from stack_core.testing import OpCheck, op_checks
from stack_kernels.llvm.host import Processor
from stack_kernels.norm.llvm import LLVM

_SIZE = "stack_kernels.llvm.many_numbers.LEAST_SIZE"


@pytest.mark.parametrize("check", op_checks("norm"), ids=str)
def test_contract(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_SIZE, 1)
    check(LLVM)


@pytest.mark.parametrize("size", [5, 64, 515])  # less than a vector, whole ones, and a rest
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_of_any_size_are_normalized(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str, size: int
) -> None:
    monkeypatch.setattr(_SIZE, 1)
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.normal(size=(70, size)) + 3, dtype) for _ in range(2))
    scale, offset = (jnp.asarray(rng.normal(size=size), "float16") for _ in range(2))
    y, h = ops.norm(x, scale, offset=offset, kind=kind, residual=residual, scale_offset=1.0, implementation=LLVM)
    summed = np.asarray(h, np.float64)
    unrounded = x.astype(jnp.float32) + residual.astype(jnp.float32)
    np.testing.assert_array_equal(np.asarray(h), np.asarray(unrounded.astype(dtype)))
    centred = summed - (summed.mean(axis=1, keepdims=True) if kind == "layer" else 0)
    exact = centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + 1e-6)
    exact = exact * (np.asarray(scale, np.float64) + 1) + np.asarray(offset, np.float64)
    rounding = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=rounding, atol=5e-6)


def test_rows_of_many_numbers_are_normalized_by_it() -> None:
    (decision,) = ops.explain(ops.norm, jnp.zeros((64, 512)), jnp.zeros(512))
    assert decision.forward.implementation.name == "llvm"


def test_gradients_are_those_of_the_reference() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 512)), jnp.float32)

    def gradient(implementation: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.sin(ops.norm(x, jnp.ones(512), implementation=implementation))))(x)

    np.testing.assert_allclose(gradient(LLVM), gradient("reference"), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "axis", "reason"), [((8, 8), -1, "32768 numbers or more"), ((512, 512), 0, "the last axis")]
)
def test_what_it_does_not_take_is_refused_with_the_reason(shape: tuple[int, int], axis: int, reason: str) -> None:
    with pytest.raises(UnsupportedOp, match=reason):
        ops.norm(jnp.zeros(shape), axis=axis, implementation=LLVM)
