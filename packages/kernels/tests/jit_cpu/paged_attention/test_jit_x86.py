from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.testing import OpCheck, Quantized, op_checks
from stack_kernels.jit_cpu.host import Processor
from stack_kernels.jit_cpu.paged_attention.jit_x86 import JIT_X86

_SEQUENCES = ((1, 45), (37, 61), (1, 1), (0, 20), (16, 16), (2, 33))  # queries and keys


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("paged_attention"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(JIT_X86)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("heads", "kv_heads", "slots", "head_dim"), [(8, 4, 16, 64), (3, 1, 5, 80), (4, 4, 33, 4)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_gives_what_the_reference_gives(
    processor: Processor, dtype: str, heads: int, kv_heads: int, slots: int, head_dim: int
) -> None:
    call = _call((heads, kv_heads, slots, head_dim), dtype)
    exact = _attend(_as(call, "float32"), "reference")
    tolerance = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    np.testing.assert_allclose(_attend(call, JIT_X86), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.covering
@pytest.mark.parametrize("layout", ["phsd", "pshd", "hpsd"])
@pytest.mark.parametrize("option", ["window", "softcap", "sinks"])
def test_options_mean_in_every_layout_what_they_mean_to_the_reference(layout: str, option: str) -> None:
    call = _call((8, 2, 8, 16), "float32", layout)
    call |= {"window": {"window": (9, None)}, "softcap": {"softcap": 0.7}, "sinks": {"sinks": jnp.arange(-4.0, 4.0)}}[
        option
    ]
    np.testing.assert_allclose(_attend(call, JIT_X86), _attend(call, "reference"), rtol=2e-6, atol=2e-6)


@pytest.mark.covering(2)
@pytest.mark.parametrize("layout", ["phsd", "pshd", "hpsd"])
@pytest.mark.parametrize(
    "option", [{}, {"window": (150, None)}, {"softcap": 0.7}, {"sinks": jnp.arange(-3.0, 3.0)}], ids=str
)
@pytest.mark.parametrize(
    ("dtype", "slots", "head_dim"), [("bfloat16", 16, 64), ("bfloat16", 48, 128), ("float32", 16, 48)]
)
def test_prompts_see_blocks_of_keys(layout: str, option: Any, dtype: str, slots: int, head_dim: int) -> None:
    sequences = (290, 401), (9, 16), (3, 130), (1, 300)
    call = _call((6, 2, slots, head_dim), dtype, layout, sequences) | option
    exact = _attend(_as(call, "float32"), "reference")
    tolerance = 8e-3 if dtype == "bfloat16" else 5e-6
    np.testing.assert_allclose(_attend(call, JIT_X86), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_a_number_stays_in_its_head(dtype: str) -> None:
    """In prompts, whose queries are looked at together, and in a single token."""
    call = _call((6, 2, 16, 64), dtype, sequences=((40, 40), (1, 30)))
    first_page = call["block_tables"][:, 0]
    call["query"] = call["query"].at[(7, 40), 2].set(jnp.nan)
    call["key_pages"] = call["key_pages"].at[first_page, 1, 0].set(jnp.nan)
    expected = _attend(call, "reference")
    assert 0 < np.isnan(expected).mean() < 1
    np.testing.assert_array_equal(np.isnan(_attend(call, JIT_X86)), np.isnan(expected))


@pytest.mark.parametrize(("key", "queries"), [(39, []), (40, [0]), (44, [1])])
def test_values_that_are_no_numbers_reach_only_queries_that_see_them(key: int, queries: list[int]) -> None:
    call = _call((6, 2, 5, 64), "float32", sequences=((2, 45),)) | {"window": (3, None)}
    page, slot = call["block_tables"][0, key // 5], key % 5
    call["value_pages"] = call["value_pages"].at[page, :, slot, 7].set(jnp.nan)
    assert np.argwhere(np.isnan(_attend(call, JIT_X86)).all(axis=1)).tolist() == [[query, 7] for query in queries]


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("query", ["float32", "bfloat16"])
def test_quantized_pages_are_read_as_their_values(processor: Processor, query: str, dtype: str) -> None:
    call = _call((8, 4, 16, 32), query)
    for name in ("key_pages", "value_pages"):
        codes = jnp.clip(call[name].astype(jnp.float32) * 30, -100, 100).astype(dtype)
        scale = jnp.linspace(0.02, 0.05, codes.size // codes.shape[-1]).reshape(*codes.shape[:-1], 1)
        call[name] = Quantized(codes, scale)
    exact = _attend(_as(call, "float32"), "reference")
    tolerance = 1e-5 if query == "float32" else 8e-3
    np.testing.assert_allclose(_attend(call, JIT_X86), exact, rtol=tolerance, atol=tolerance)


def test_scores_of_any_size_neither_overflow_nor_vanish() -> None:
    call = _call((4, 2, 16, 16), "float32")
    call["query"] *= 300
    # Scores reach 1000, which fp32 holds to 6e-5 and its sums to a few times that: so exact are their exponentials.
    np.testing.assert_allclose(_attend(call, JIT_X86), _attend(call, "reference"), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize(
    ("sizes", "dtype", "reason"),
    [((2, 2, 4, 6), "float32", "multiple of 4"), ((2, 2, 4, 512), "float32", "up to 256")],
)
def test_what_it_does_not_take_is_refused_with_the_reason(sizes: Any, dtype: str, reason: str) -> None:
    with pytest.raises(UnsupportedOp, match=reason):
        _attend(_call(sizes, dtype), JIT_X86)


def _call(
    sizes: tuple[int, int, int, int],
    dtype: str,
    layout: str = "phsd",
    sequences: tuple[tuple[int, int], ...] = _SEQUENCES,
) -> dict[str, Any]:
    """Queries of sequences of many lengths, and padding; slots without a key hold NaN."""
    heads, kv_heads, slots, head_dim = sizes
    rng = np.random.default_rng(0)
    queries, lengths = (np.array(counts) for counts in zip(*sequences, strict=True))
    used = -(-lengths // slots)
    tables = np.full((len(used), used.max() + 1), 10**6)
    numbers = iter(rng.permutation(used.sum()))
    held = np.zeros((used.sum(), slots), bool)
    for row, count, length in zip(tables, used, lengths, strict=True):
        row[:count] = [next(numbers) for _ in range(count)]
        held[row[:count].repeat(slots)[:length], np.arange(length) % slots] = True

    def pool() -> jax.Array:
        drawn = rng.normal(size=(*held.shape, kv_heads, head_dim))
        drawn = np.where(held[:, :, None, None], drawn, np.nan)
        return jnp.asarray(drawn.transpose(["pshd".index(axis) for axis in layout]), dtype)

    return {
        "query": jnp.asarray(rng.normal(size=(queries.sum() + 3, heads, head_dim)), dtype),
        "key_pages": pool(),
        "value_pages": pool(),
        "block_tables": jnp.asarray(tables, jnp.int32),
        "kv_lengths": jnp.asarray(lengths, jnp.int32),
        "query_starts": jnp.asarray([0, *np.cumsum(queries)], jnp.int32),
        "layout": layout,
    }


def _as(call: dict[str, Any], dtype: str) -> dict[str, Any]:
    floating = {
        name: call[name] for name in ("query", "key_pages", "value_pages") if not isinstance(call[name], Quantized)
    }
    return call | {name: array.astype(dtype) for name, array in floating.items()}


def _attend(call: dict[str, Any], implementation: Any) -> np.ndarray:
    arrays = {name: value for name, value in call.items() if name not in ("layout", "window", "softcap")}
    options = {name: call[name] for name in call.keys() - arrays.keys()}
    attend = jax.jit(lambda arrays: ops.paged_attention(**arrays, **options, implementation=implementation))
    return np.asarray(attend(arrays).astype(jnp.float32))
