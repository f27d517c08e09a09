"""Chunks of the reference, by the platform of the target."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip

ROWS, EMBED, VOCAB = 2048, 8, 16_384


def _loss(hidden: jax.Array, weight: jax.Array, labels: jax.Array) -> jax.Array:
    return ops.linear_cross_entropy(hidden, weight, labels, implementation="reference")


def _operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, VOCAB, ROWS)
    labels[::7] = -100
    hidden, weight = rng.normal(size=(ROWS, EMBED)), rng.normal(size=(EMBED, VOCAB))
    return jnp.float32(hidden), jnp.float32(weight), jnp.asarray(labels)


@pytest.fixture(scope="module")
def expected() -> Any:
    return jax.value_and_grad(_loss, (0, 1))(*_operands())


@pytest.mark.parametrize(
    ("kind", "chunks", "scatters"),
    [(None, 8, True), ("h100", 1, False), pytest.param("v6e", 1, False, marks=pytest.mark.slow)],
)
def test_accelerators_get_large_chunks_and_a_gradient_without_scatter(
    kind: str | None, chunks: int, scatters: bool, expected: Any
) -> None:
    gradient = jax.value_and_grad(_loss, (0, 1))
    with use_chip(registries.chips[kind]) if kind else contextlib.nullcontext():
        program = str(jax.make_jaxpr(gradient)(*_operands()))
        found = jax.jit(gradient)(*_operands())
    assert set(re.findall(r"\blength=(\d+)", program)) == {str(chunks)}
    assert ("scatter" in program) == scatters
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)
