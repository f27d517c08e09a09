from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stack_kernels.jit_cpu import vectors
from stack_kernels.jit_cpu.builder import Builder
from stack_kernels.jit_cpu.host import Processor

from .conftest import applied


def test_exp_is_exact_to_two_units_in_the_last_place(processor: Processor) -> None:
    x = np.linspace(-87, 88, 2**16, dtype=np.float32)
    np.testing.assert_allclose(applied("exp", vectors.exp, x), np.exp(x.astype(np.float64)), rtol=2.4e-7)


def test_exp_of_what_is_too_small_is_next_to_nothing(processor: Processor) -> None:
    found = applied("exp", vectors.exp, np.full(16, -np.inf, np.float32))
    assert (found >= 0).all()
    assert (found < 2e-38).all()


@pytest.mark.parametrize("name", ["exp", "tanh"])
def test_what_is_not_a_number_stays_so_and_stays_in_its_lane(processor: Processor, name: str) -> None:
    x = np.where(np.arange(64) % 3 == 0, np.nan, 0.5).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(applied(name, getattr(vectors, name), x)), np.isnan(x))


def test_tanh_reaches_its_ends(processor: Processor) -> None:
    x = np.concatenate([np.linspace(-20, 20, 2**12 - 2, dtype=np.float32), [-np.inf, np.inf]]).astype(np.float32)
    found = applied("tanh", vectors.tanh, x)
    np.testing.assert_allclose(found, np.tanh(x.astype(np.float64)), atol=3e-7)


@pytest.mark.parametrize("reduce", [vectors.total, vectors.reduce_max])
def test_lanes_become_one_number(processor: Processor, reduce: Callable[[Builder, Any], Any]) -> None:
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)

    def reduced(builder: Builder, values: Any) -> Any:
        return builder.splat(reduce(builder, values), processor.lanes)

    rows = x.reshape(-1, processor.lanes)
    expected = rows.sum(1) if reduce is vectors.total else rows.max(1)
    found = applied(reduce.__name__, reduced, x).reshape(rows.shape)
    np.testing.assert_allclose(found, np.repeat(expected[:, None], processor.lanes, 1), rtol=1e-5)


def test_sums_of_several_vectors_come_in_their_order(processor: Processor) -> None:
    lanes = processor.lanes

    def sums(builder: Builder, values: Any) -> Any:
        return vectors.sums(
            builder, [builder.build.fmul(values, vectors.constant(factor, lanes)) for factor in range(lanes)]
        )

    x = np.random.default_rng(0).normal(size=lanes).astype(np.float32)
    np.testing.assert_allclose(applied("sums", sums, x), x.sum() * np.arange(lanes), rtol=1e-5, atol=1e-5)


def test_a_square_of_vectors_is_transposed(processor: Processor) -> None:
    x = np.arange(processor.lanes**2, dtype=np.float32)

    def first_column(builder: Builder, values: Any) -> Any:
        rows = [
            builder.build.fadd(values, vectors.constant(1000 * row, processor.lanes)) for row in range(processor.lanes)
        ]
        return vectors.transposed(builder, rows)[1]

    found = applied("transposed", first_column, x).reshape(-1, processor.lanes)
    for row, start in zip(found, x[:: processor.lanes], strict=True):
        np.testing.assert_array_equal(row, start + 1 + 1000 * np.arange(processor.lanes))
