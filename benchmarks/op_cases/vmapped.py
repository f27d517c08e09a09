"""Calls of every op under `jax.vmap` over four elements: of its rows alone, and of its weights or keys as well."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from op_cases import Case, forward_and_gradient, normal
from stack_core import ops

MAPPED = 4


def _case(
    name: str,
    op: Callable[..., Any],
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    *,
    mapped: Sequence[int],
    further: Callable[[np.random.Generator], tuple[Any, ...]] = lambda rng: (),
    moving: Sequence[int] = (),
) -> list[Case]:
    """The call forward, and with gradients of the operands at `moving`.

    Args:
      shapes: of the floating operands without the mapped axis.
      mapped: positions of the floating operands that have it, in front; `further` ones all have it.
    """

    def operands(rng: np.random.Generator) -> tuple[Any, ...]:
        sizes = [(MAPPED, *shape) if i in mapped else shape for i, shape in enumerate(shapes)]
        drawn = [normal(rng, size, dtype, size[-2] ** -0.5 if len(size) > 1 else 1.0) for size in sizes]
        return *drawn, *(np.stack(each) for each in zip(*(further(rng) for _ in range(MAPPED)), strict=True))

    count = len(shapes) + len(further(np.random.default_rng(0)))
    axes = tuple(0 if i in mapped or i >= len(shapes) else None for i in range(count))
    contenders = {
        "stack": jax.vmap(op, in_axes=axes),
        "core": jax.vmap(partial(op, implementation="reference"), in_axes=axes),
    }
    case = Case(name=f"{name}, {dtype}", operands=operands, contenders=contenders, exact_dtype="float32")
    return forward_and_gradient(case, moving) if moving else [case]


def _labels(rng: np.random.Generator) -> tuple[np.ndarray]:
    return (rng.integers(0, 4096, 256, dtype=np.int32),)


def _group_sizes(rng: np.random.Generator) -> tuple[np.ndarray]:
    return (rng.multinomial(256, [1 / 8] * 8).astype(np.int32),)


def _decays(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    decay, beta = (rng.uniform(0, limit, (1, 256, 4)).astype(np.float32) for limit in (0.1, 1))
    return -decay, beta


def _positions(rng: np.random.Generator) -> tuple[np.ndarray]:
    return (np.arange(256, dtype=np.int32)[None] + rng.integers(0, 256, dtype=np.int32),)


def _pages(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    tables = rng.permutation(64).reshape(8, 8).astype(np.int32)
    return tables, np.full(8, 100, np.int32), np.arange(9, dtype=np.int32)


def _rope(x: Any, positions: Any, **choice: Any) -> Any:
    return ops.rope(x, positions, theta=10000.0, **choice)


def _linear_attention(query: Any, key: Any, value: Any, decay: Any, beta: Any, **choice: Any) -> Any:
    return ops.linear_attention(query, key, value, decay=decay, beta=beta, **choice)[0]


def _paged(query: Any, keys: Any, values: Any, tables: Any, lengths: Any, starts: Any, **choice: Any) -> Any:
    places = {"block_tables": tables, "kv_lengths": lengths, "query_starts": starts}
    return ops.paged_attention(query, keys, values, **places, **choice)


def _of(dtype: str) -> list[Case]:
    rows, weight = (256, 512), (512, 2048)
    heads = [(1, 256, 8, 64)] * 3
    return [
        *_case("linear, rows", ops.linear, (rows, weight), dtype, mapped=(0,), moving=(0, 1)),
        *_case("linear, rows and weight", ops.linear, (rows, weight), dtype, mapped=(0, 1), moving=(0, 1)),
        *_case("linear, weight", ops.linear, (rows, weight), dtype, mapped=(1,), moving=(0, 1)),
        *_case("linear, one row", ops.linear, ((1, 512), weight), dtype, mapped=(0,)),
        *_case("gated unit, rows", ops.gated_linear_unit, (rows, weight, weight), dtype, mapped=(0,), moving=(0, 1, 2)),
        *_case("gated unit, all", ops.gated_linear_unit, (rows, weight, weight), dtype, mapped=(0, 1, 2)),
        *_case("norm, rows", ops.norm, (rows, (512,)), dtype, mapped=(0,), moving=(0, 1)),
        *_case("norm, rows and scale", ops.norm, (rows, (512,)), dtype, mapped=(0, 1), moving=(0, 1)),
        *_case("rope, all", _rope, ((1, 256, 8, 64),), dtype, mapped=(0,), further=_positions, moving=(0,)),
        *_case("attention, all", ops.attention, heads, dtype, mapped=(0, 1, 2), moving=(0, 1, 2)),
        *_case("attention, queries", ops.attention, heads, dtype, mapped=(0,), moving=(0,)),
        *_case(
            "loss, rows", ops.linear_cross_entropy, (rows, (512, 4096)), dtype,
            mapped=(0,), further=_labels, moving=(0, 1),
        ),
        *_case(
            "ragged, all", ops.ragged_dot, (rows, (8, 512, 512)), dtype,
            mapped=(0, 1), further=_group_sizes, moving=(0, 1),
        ),
        *_case(
            "linear attention, all", _linear_attention, [(1, 256, 4, 64)] * 3, dtype,
            mapped=(0, 1, 2), further=_decays, moving=(0, 1, 2),
        ),
        *_case("pages, all", _paged, ((8, 8, 64), *[(64, 4, 16, 64)] * 2), dtype, mapped=(0, 1, 2), further=_pages),
    ]  # fmt: skip


CASES = tuple(case for dtype in ("float32", "bfloat16") for case in _of(dtype))
