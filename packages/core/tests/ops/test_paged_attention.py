import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.ops.definitions import paged_attention
from stack_core.ops.definitions.paged_attention import REFERENCE
from stack_core.testing import OpCheck, op_checks

HEADS, KV_HEADS, SLOTS, HEAD_DIM = 4, 2, 4, 8
QUERIES, LENGTHS = np.array([1, 6, 0, 3]), np.array([9, 6, 5, 14])
STARTS = np.concatenate([[0], np.cumsum(QUERIES)])


def _normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


def _paged(query: Any, key: Any, value: Any, **arguments: Any) -> Any:
    """`ops.paged_attention` of dense keys [batch, keys, kv_heads, head_dim], cut into pages in a shuffled order."""
    batch, keys = key.shape[:2]
    order = np.random.default_rng(0).permutation(batch * keys // SLOTS)
    pools = [
        jnp.zeros((batch * keys // SLOTS, KV_HEADS, SLOTS, HEAD_DIM)).at[order].set(_in_pages(x)) for x in (key, value)
    ]
    places = {"kv_lengths": jnp.asarray(LENGTHS), "query_starts": jnp.asarray(STARTS)}
    tables = jnp.asarray(order.reshape(batch, -1))
    call = functools.partial(ops.paged_attention, **arguments)
    return jax.jit(call)(query, *pools, block_tables=tables, **places)


def _in_pages(x: Any) -> Any:
    return x.reshape(-1, SLOTS, KV_HEADS, HEAD_DIM).swapaxes(1, 2)


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.slow), {"window": (3, None), "softcap": 1.5, "scale": 0.4}],
    ids=["plain", "options"],
)
def test_it_is_attention_of_every_sequence_alone(options: dict[str, Any]) -> None:
    query, sinks = _normal(0, STARTS[-1], HEADS, HEAD_DIM), _normal(3, HEADS)
    key, value = _normal(1, 4, 16, KV_HEADS, HEAD_DIM), _normal(2, 4, 16, KV_HEADS, HEAD_DIM)
    paged = _paged(query, key, value, sinks=sinks, **options)
    for row, length in enumerate(LENGTHS):
        own = slice(STARTS[row], STARTS[row + 1])
        keys = (key[row : row + 1, :length], value[row : row + 1, :length])
        dense = jax.jit(functools.partial(ops.attention, causal=True, sinks=sinks, **options))(query[None, own], *keys)
        np.testing.assert_allclose(paged[own], dense[0], atol=2e-6)


@pytest.mark.parametrize("left", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_queries_see_keys_ahead(left: int | None) -> None:
    query = _normal(0, STARTS[-1], HEADS, HEAD_DIM)
    key, value = _normal(1, 4, 16, KV_HEADS, HEAD_DIM), _normal(2, 4, 16, KV_HEADS, HEAD_DIM)
    ahead = np.array([4, 3, 2, 1, 0, 9, 0, 2, 1, 0], np.int32)
    window = None if left is None else (left, 0)
    paged = _paged(query, key, value, ahead=jnp.asarray(ahead), window=window)
    for row, length in enumerate(LENGTHS):
        own = slice(STARTS[row], STARTS[row + 1])
        positions = length - QUERIES[row] + np.arange(QUERIES[row])
        mask = np.arange(length) <= (positions + ahead[own])[:, None]
        if left is not None:
            mask &= np.arange(length) >= (positions - left)[:, None]
        keys = (key[row : row + 1, :length], value[row : row + 1, :length])
        dense: Any = ops.attention(query[None, own], *keys, mask=jnp.asarray(mask[None, None]))
        np.testing.assert_allclose(paged[own], dense[0], atol=2e-6)


def test_it_agrees_with_jax_ragged_paged_attention() -> None:
    kernel = importlib.import_module("jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel")
    query = _normal(0, 12, HEADS, HEAD_DIM)
    key_pages, value_pages = _normal(1, 20, SLOTS, KV_HEADS, HEAD_DIM), _normal(2, 20, SLOTS, KV_HEADS, HEAD_DIM)
    tables = jnp.arange(16).reshape(4, 4) + 2
    lengths, starts = jnp.asarray(LENGTHS, jnp.int32), jnp.asarray(STARTS, jnp.int32)
    both = jnp.stack([key_pages, value_pages], axis=3).reshape(20, SLOTS, 2 * KV_HEADS, HEAD_DIM)
    theirs = kernel.ref_ragged_paged_attention(
        query, both, lengths, tables, starts, jnp.array([4]), sm_scale=0.3, soft_cap=2.0
    )
    places = {"block_tables": tables, "kv_lengths": lengths, "query_starts": starts}
    call = functools.partial(ops.paged_attention, scale=0.3, softcap=2.0, layout="pshd")
    ours = jax.jit(call)(query, key_pages, value_pages, **places)
    np.testing.assert_allclose(ours[: STARTS[-1]], theirs[: STARTS[-1]], atol=2e-6)
    one_pool = both.reshape(20, SLOTS, KV_HEADS, 2, HEAD_DIM)
    of_one = jax.jit(functools.partial(call, layout="psh2d"))(query, one_pool, None, **places)
    np.testing.assert_allclose(of_one, ours, atol=2e-6)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check.aspect == "float32" else pytest.mark.slow)
        for check in op_checks("paged_attention")
        if check.case.name == "everything" or str(check) == "window-float32"
    ],
    ids=str,
)
def test_a_page_a_step(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "_STEP_SLOTS", 1)
    check(REFERENCE)


@pytest.mark.parametrize(("window", "visited"), [(None, 4), ((2, 0), 2)])
def test_only_pages_that_a_query_sees_are_visited(window: Any, visited: int, monkeypatch: pytest.MonkeyPatch) -> None:
    visits = []
    take = paged_attention.take

    def counted(*arguments: Any) -> Any:
        jax.debug.callback(lambda: visits.append(1))
        return take(*arguments)

    monkeypatch.setattr(paged_attention, "take", counted)
    monkeypatch.setattr(paged_attention, "_STEP_SLOTS", SLOTS)
    pool = _normal(0, 9, KV_HEADS, SLOTS, HEAD_DIM)
    # 100 pages a sequence; the one with keys beyond its neighbours' has no query.
    places = {"kv_lengths": jnp.array([14, 12, 300]), "query_starts": jnp.array([0, 1, 2, 2])}
    query, tables = _normal(1, 3, HEADS, HEAD_DIM), jnp.zeros((3, 100), jnp.int32)
    call = functools.partial(ops.paged_attention, window=window, implementation="reference")
    jax.block_until_ready(jax.jit(call)(query, pool, pool, block_tables=tables, **places))
    jax.effects_barrier()
    assert len(visits) == 2 * visited


def test_memory_does_not_grow_with_the_tables() -> None:
    def temporary_bytes(pages_per_seq: int) -> int:
        query = jax.ShapeDtypeStruct((32, 8, 64), "bfloat16")
        pool = jax.ShapeDtypeStruct((4096, 4, 128, 64), "bfloat16")
        places = {"block_tables": (32, pages_per_seq), "kv_lengths": (32,), "query_starts": (33,)}
        integers = {name: jax.ShapeDtypeStruct(shape, "int32") for name, shape in places.items()}
        compiled = jax.jit(ops.paged_attention).lower(query, pool, pool, **integers).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(4096) < temporary_bytes(16) + 2**20
