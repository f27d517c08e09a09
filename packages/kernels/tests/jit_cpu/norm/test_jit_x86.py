from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.testing import OpCheck, op_checks
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.norm.jit_x86 import JIT_X86

_SIZE = "stack_kernels.jit_cpu.many_numbers.MIN_SIZE"
_ROWS = "stack_kernels.jit_cpu.many_numbers.MIN_ROWS"


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("norm"), ids=str)
def test_contract(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_SIZE, 1)
    monkeypatch.setattr(_ROWS, 1)
    check(JIT_X86)


@pytest.mark.covering(2)
@pytest.mark.parametrize("size", [5, 64, 515])  # less than a vector, whole ones, and a rest
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_of_any_size_are_normalized(
    processor: Processor, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str, size: int
) -> None:
    monkeypatch.setattr(_SIZE, 1)
    monkeypatch.setattr(_ROWS, 1)
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.normal(size=(70, size)) + 3, dtype) for _ in range(2))
    scale, offset = (jnp.asarray(rng.normal(size=size), "float16") for _ in range(2))
    y, h = ops.norm(x, scale, offset=offset, kind=kind, residual=residual, scale_offset=1.0, implementation=JIT_X86)
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
    assert decision.forward.implementation.name == "jit_x86"


def test_few_rows_are_left_to_xla_however_wide() -> None:
    for rows in (1, 8, 63):
        (decision,) = ops.explain(ops.norm, jnp.zeros((rows, 2**15)), jnp.zeros(2**15))
        assert decision.forward.implementation.name == "reference"


@pytest.mark.covering(2)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_over_many_rows_are_those_of_the_reference(
    processor: Processor, dtype: str, kind: str, has_residual: bool
) -> None:
    """In several parts, of which the last is not whole; the reference's in float64, from the same rounded sum."""
    rng = np.random.default_rng(0)
    x, *cotangents = (jnp.asarray(rng.normal(size=(611, 515)) + 1, dtype) for _ in range(3))
    scale, offset = (jnp.asarray(rng.normal(size=515), dtype) for _ in range(2))
    residual = jnp.asarray(rng.normal(size=x.shape), dtype) if has_residual else None

    def gradients(implementation: Any, x: Any, residual: Any, scale: Any, offset: Any) -> Any:
        def norm(x: Any, residual: Any, scale: Any, offset: Any) -> Any:
            options = {"offset": offset, "kind": kind, "residual": residual, "scale_offset": 1.0}
            found = ops.norm(x, scale, **options, implementation=implementation)
            return found if has_residual else (found,)

        found, vjp = jax.vjp(norm, x, residual, scale, offset)
        return vjp(tuple(cotangent.astype(y.dtype) for y, cotangent in zip(found, cotangents, strict=False)))

    found = gradients(JIT_X86, x, residual, scale, offset)
    whole = x if residual is None else (x + residual)
    with jax.enable_x64(True):
        wide = [None if x is None else x.astype("float64") for x in (whole, residual, scale, offset)]
        exact = gradients("reference", wide[0], None if residual is None else 0 * wide[1], *wide[2:])
    rounding = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol=rounding, atol=2e-5)


def test_gradients_are_its_own() -> None:
    def loss(x: Any, scale: Any) -> Any:
        return jnp.sum(ops.norm(x, scale))

    decisions = ops.explain(jax.grad(loss, argnums=(0, 1)), jnp.zeros((64, 512)), jnp.zeros(512))
    assert {decision.backward.implementation.name for decision in decisions} == {"jit_x86"}


def test_examples_with_a_scale_each_are_normalized_at_once() -> None:
    rng = np.random.default_rng(0)
    x, scale = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 64, 512), (3, 512)))
    offset = jnp.asarray(rng.normal(size=512), jnp.float32)

    def normed(x: Any, scale: Any, implementation: Any = JIT_X86) -> Any:
        return ops.norm(x, scale, offset=offset, residual=x, scale_offset=1.0, implementation=implementation)

    mapped = jax.jit(jax.vmap(normed))
    assert "while" not in mapped.lower(x, scale).as_text()  # a call for each example would be a loop
    for found, exact in zip(
        mapped(x, scale), jax.vmap(partial(normed, implementation="reference"))(x, scale), strict=True
    ):
        np.testing.assert_allclose(found, exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("shape", "axis", "reason"), [((64, 8), -1, "32768 numbers or more"), ((512, 512), 0, "the last axis")]
)
def test_what_it_does_not_take_is_refused_with_the_reason(shape: tuple[int, int], axis: int, reason: str) -> None:
    with pytest.raises(UnsupportedOp, match=reason):
        ops.norm(jnp.zeros(shape), axis=axis, implementation=JIT_X86)
