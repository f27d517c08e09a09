import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.ops import OpImplementation
from stack_core.testing import OpCheck, op_checks
from stack_kernels.linear_cross_entropy.chunks import Chunks
from stack_kernels.linear_cross_entropy.xla_cpu import XLA_CPU


def _with(config: Chunks) -> OpImplementation:
    return dataclasses.replace(XLA_CPU, default=lambda call, chip: config)


KEPT, AGAIN = (_with(Chunks(chunk_rows=5, tile_bytes=16 * 5 * 4, keeps_exponentials=keeps)) for keeps in (True, False))
BOTH = pytest.mark.parametrize("small", [KEPT, AGAIN], ids=["kept exponentials", "logits again"])


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("linear_cross_entropy"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


IN_TILES = (
    "plain",
    "none",
    "ignored",
    "whole_tiles",
    "bias",
    "quantized_by_tile",
    "everything_that_heads_have",
    "not_a_number",
)


@pytest.mark.covering
@BOTH
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check.case.name in IN_TILES else pytest.mark.slow)
        for check in op_checks("linear_cross_entropy")
        if check.aspect == "float32" and check.case.name not in {"large_vocabulary", "odd_sizes", "empty_rows"}
    ],
    ids=str,
)
def test_tiles_that_overlap_and_a_chunk_that_is_not_filled(
    check: OpCheck, small: OpImplementation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract's 37 columns make two tiles of 32, and its 14 rows three chunks of 5."""
    monkeypatch.setattr("stack_kernels.linear_cross_entropy.chunks._SMALL_BYTES", 0)
    check(small)


@BOTH
def test_a_nearly_certain_label_has_an_accurate_gradient_in_bf16(small: OpImplementation) -> None:
    """Of the probability's distance from 1, not of the rounded probability."""
    hidden, weight = jnp.ones((4, 1), jnp.bfloat16), jnp.zeros((1, 37), jnp.bfloat16).at[0, 5].set(12)
    of_weight = jax.grad(lambda w: ops.linear_cross_entropy(hidden, w, jnp.full(4, 5), implementation=small))(weight)
    expected = -36 * np.exp(-12) / (1 + 36 * np.exp(-12))
    np.testing.assert_allclose(of_weight[0, 5].astype(jnp.float32), expected, rtol=2e-2)


@BOTH
def test_a_label_whose_tile_has_no_part_in_the_sum_still_has_its_gradient(small: OpImplementation) -> None:
    hidden, weight = jnp.ones((2, 1)), jnp.zeros((1, 37)).at[0, 20].set(500.0)
    loss, of_weight = jax.value_and_grad(
        lambda w: ops.linear_cross_entropy(hidden, w, jnp.array([3, 20]), implementation=small)
    )(weight)
    np.testing.assert_allclose(loss, 250, rtol=1e-6)
    np.testing.assert_allclose(
        of_weight[0], np.zeros(37) + 0.5 * (np.arange(37) == 20) - 0.5 * (np.arange(37) == 3), atol=1e-6
    )


@BOTH
@pytest.mark.parametrize("label", [-1, 37, 2**30])
def test_a_label_outside_the_vocabulary_makes_its_loss_nan(label: int, small: OpImplementation) -> None:
    losses = ops.linear_cross_entropy(
        jnp.ones((3, 2)), jnp.ones((2, 37)), jnp.array([0, label, -100]), reduction="none", implementation=small
    )
    assert np.isnan(losses).tolist() == [False, True, False]


@pytest.mark.parametrize("keeps_exponentials", [True, False])
def test_a_bf16_gradient_of_many_chunks_is_as_precise_as_that_of_one(
    keeps_exponentials: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each chunk adds a 64th: in bf16 alone, such a sum would lose a part of every one."""
    monkeypatch.setattr("stack_kernels.linear_cross_entropy.chunks._SMALL_BYTES", 0)
    hidden = jnp.ones((128, 4), jnp.bfloat16)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)

    def gradient(chunk_rows: int) -> np.ndarray:
        two_tiles = 32 * 4 * chunk_rows
        config = Chunks(chunk_rows=chunk_rows, tile_bytes=two_tiles, keeps_exponentials=keeps_exponentials)
        implementation = _with(config)
        labels = jnp.zeros(128, jnp.int32)
        of_weight = jax.grad(lambda w: ops.linear_cross_entropy(hidden, w, labels, implementation=implementation))
        return np.asarray(of_weight(weight), np.float32)

    np.testing.assert_allclose(gradient(2), gradient(128), rtol=2**-7)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("keeps_exponentials", "dtype", "vocab", "most"),
    [(True, "bfloat16", 50_000, 1 / 3), (True, "float32", 131_072, 1 / 6), (False, "bfloat16", 131_072, 1 / 20)],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_are_never_whole(
    reduction: str, keeps_exponentials: bool, dtype: str, vocab: int, most: float
) -> None:
    rows = 2048
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, 16), (16, vocab))]
    implementation = _with(Chunks(keeps_exponentials=keeps_exponentials))

    def total(hidden: Any, weight: Any) -> Any:
        labels = jnp.zeros(rows, jnp.int32)
        losses = ops.linear_cross_entropy(hidden, weight, labels, reduction=reduction, implementation=implementation)
        return jnp.sum(losses)

    compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*operands).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < most * 4 * rows * vocab
