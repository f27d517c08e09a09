"""Grouped products of codes: values, rows of no group, and that codes are multiplied as they are."""

import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.ops.building import (
    has_ragged_outer_product_of_codes,
    has_ragged_product_of_codes,
    ragged_outer_product_of_codes,
    ragged_product_of_codes,
)
from stack_core.testing import Quantized

CODES = importlib.import_module("stack_core.ops.references.ragged_codes")
SIZES = (131, 0, 3, 70)
ROWS, D_IN, D_OUT = 211, 37, 19  # the last 7 rows belong to no group
KINDS = {"int8": ("int8", "int8"), "fp8": ("float8_e4m3fn", "float8_e4m3fn"), "mixed fp8": ("float8_e5m2",) * 2}


def quantized(shape: tuple[int, ...], scales: tuple[int, ...], dtype: str, seed: int = 0) -> Quantized:
    rng = np.random.default_rng(seed)
    codes = jnp.asarray(rng.integers(-127, 128, shape), jnp.float32).astype(dtype)
    return Quantized(codes, jnp.asarray(rng.uniform(0.5, 2, scales), jnp.float32))


def dense(array: Quantized) -> np.ndarray:
    return np.asarray(array.values, np.float64) * np.asarray(array.scales, np.float64)


def near(found: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("tile_rows", [16, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_those_of_dequantized_operands(
    kind: str, tile_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CODES, "tile_rows_of", lambda rows, groups, most: tile_rows)
    left, right = KINDS[kind]
    rows, matrices = quantized((ROWS, D_IN), (ROWS, 1), left), quantized((4, D_IN, D_OUT), (4, 1, D_OUT), right, 1)
    group = np.repeat(np.arange(4), SIZES)
    expected = np.einsum("rk,rkn->rn", dense(rows)[: len(group)], dense(matrices)[group])
    assert has_ragged_product_of_codes(rows, matrices)
    found = ragged_product_of_codes(rows, matrices, jnp.array(SIZES), "float32")
    near(found[: len(group)], expected)
    np.testing.assert_array_equal(found[len(group) :], 0)


@pytest.mark.parametrize("kind", KINDS)
def test_outer_products_sum_over_the_rows_of_a_group(kind: str) -> None:
    left, right = KINDS[kind]
    rows, others = quantized((ROWS, D_IN), (1, D_IN), left), quantized((ROWS, D_OUT), (1, D_OUT), right, 1)
    ends = np.cumsum(SIZES)
    parts = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    expected = np.stack([dense(rows)[part].T @ dense(others)[part] for part in parts])
    assert has_ragged_outer_product_of_codes(rows, others)
    near(ragged_outer_product_of_codes(rows, others, jnp.array(SIZES), "float32"), expected)


def test_sizes_beyond_the_rows_and_shared_scales() -> None:
    rows, matrices = quantized((9, 4), (1, 1), "int8"), quantized((2, 4, 6), (1, 1, 3), "int8", 1)
    spread = Quantized(matrices.values, jnp.repeat(matrices.scales, 2, axis=2))
    found = ragged_product_of_codes(rows, matrices, jnp.array([5, 2**31 - 1]), "float32")
    near(found, np.concatenate([dense(rows)[:5] @ dense(spread)[0], dense(rows)[5:] @ dense(spread)[1]]))


def test_codes_are_multiplied_as_they_are() -> None:
    rows, matrices = quantized((64, 8), (64, 1), "float8_e5m2"), quantized((2, 8, 8), (2, 1, 8), "float8_e4m3fn")
    lowered = jax.jit(lambda x, w, sizes: ragged_product_of_codes(x, w, sizes, "bfloat16"))
    text = lowered.lower(rows, matrices, jnp.array([30, 34])).as_text()
    (operands,) = re.findall(r"dot_general .*: \((.*)\) ->", text)
    assert "xf8E5M2>" in operands and "xf8E4M3FN>" in operands


@pytest.mark.parametrize(
    ("rows", "matrices"),
    [
        (quantized((8, 4), (8, 1), "int8"), quantized((2, 4, 4), (2, 1, 4), "float8_e4m3fn")),
        (quantized((8, 4), (8, 2), "int8"), quantized((2, 4, 4), (2, 1, 4), "int8")),
        (quantized((8, 4), (8, 1), "int8"), quantized((2, 4, 4), (2, 2, 4), "int8")),
        (jnp.ones((8, 4)), quantized((2, 4, 4), (2, 1, 4), "int8")),
    ],
    ids=["an integer and fp8", "tiles of rows", "tiles of matrices", "floats"],
)
def test_products_that_scales_do_not_allow(rows: Any, matrices: Any) -> None:
    assert not has_ragged_product_of_codes(rows, matrices)
