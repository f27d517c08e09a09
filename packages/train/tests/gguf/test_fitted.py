"""Fitted blocks are what the `gguf` package reads, with less error than types with as many bits of an entry."""

import gguf
import numpy as np
import pytest

from stack_train.gguf.fitted import FITTED, K_QUANTS, quantize

ROWS = np.random.default_rng(0).normal(0, 0.1, (24, 512)).astype(np.float32)


def values_of(blocks, kind):
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def relative_error(values):
    return np.sqrt(np.mean((values - ROWS) ** 2) / np.mean(ROWS**2))


@pytest.mark.parametrize(
    ("kind", "bound", "plain"), [("Q4_K", 0.074, "Q4_1"), ("Q5_K", 0.037, "Q5_1"), ("Q6_K", 0.019, None)]
)
def test_errors_are_small(kind, bound, plain):
    error = relative_error(values_of(quantize(ROWS, kind), kind))
    assert error < bound
    if plain is not None:
        plain_type = gguf.GGMLQuantizationType[plain]
        assert error < relative_error(values_of(gguf.quants.quantize(ROWS, plain_type), plain))


@pytest.mark.parametrize("kind", K_QUANTS)
def test_rows_without_spread_keep_their_value(kind):
    rows = np.repeat(np.float32([[0], [0.25], [-0.125], [1e-30]]), 256, axis=1)
    found = values_of(quantize(rows, kind), kind)
    np.testing.assert_allclose(found[:3], rows[:3], rtol=1e-3)
    np.testing.assert_allclose(found[3], 0, atol=1e-29)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_an_outlier_costs_only_its_tile(kind):
    rows = ROWS.copy()
    rows[:, 40] = 3.0
    found = values_of(quantize(rows, kind), kind)
    np.testing.assert_allclose(found[:, 40], 3.0, rtol=0.02)
    others = np.r_[0:32, 64:512]
    assert np.abs(found - rows)[:, others].max() < 0.1 < np.abs(rows).max()


def test_blocks_after_the_first_chunk_are_their_own():
    many = np.tile(ROWS, (50, 1))
    np.testing.assert_array_equal(quantize(many, "Q4_K"), np.tile(quantize(ROWS, "Q4_K"), (50, 1)))


@pytest.mark.parametrize("kind", FITTED)
def test_important_columns_lose_less(kind):
    importance = np.random.default_rng(1).lognormal(sigma=2, size=(1, 512)).astype(np.float32)
    kind_of = gguf.GGMLQuantizationType[kind]
    plain = quantize(ROWS, kind) if kind in K_QUANTS else gguf.quants.quantize(ROWS, kind_of)

    def error(blocks):
        return np.sum(importance * (values_of(blocks, kind) - ROWS) ** 2)

    fitted = quantize(ROWS, kind, importance)
    assert fitted.shape == plain.shape
    assert error(fitted) < 0.85 * error(plain)
    # Equal importance is fitted, too, and costs nothing.
    equal = relative_error(values_of(quantize(ROWS, kind, np.ones((1, 512), np.float32)), kind))
    assert equal < 1.01 * relative_error(values_of(plain, kind))


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K"])
def test_each_matrix_has_its_own_importance_and_unseen_columns_keep_their_value(kind):
    importance = np.zeros((2, 1, 512), np.float32)
    importance[1, :, :100] = 3.0
    both = np.stack([ROWS, ROWS])
    found = quantize(both, kind, importance)
    np.testing.assert_array_equal(found[1], quantize(ROWS, kind, importance[1]))
    # Without any input all columns count, and beside others, columns without input are merely coarse.
    assert relative_error(values_of(found[0], kind)) < 0.08
    error = values_of(found[1], kind) - ROWS
    assert np.sqrt(np.mean(error[:, 128:] ** 2)) < 0.1 * np.sqrt(np.mean(ROWS**2))
