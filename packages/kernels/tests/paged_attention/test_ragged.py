"""The adapter of the jax wheel's ragged paged attention, which no interpreter runs.

The library's own form of it in plain JAX stands in for the kernel here. It leaves NaN where the kernel leaves memory as
it was, and fails where the kernel would wait for a page that it never fetched.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as library
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel as of_library

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips.targets import Target, use_target
from stack_core.testing import first_call
from stack_kernels.paged_attention.ragged import RAGGED

V6E = registries.chips["v6e"]
LENGTHS, QUERIES = (9, 0, 3, 1, 12, 0), (1, 2, 5, 0, 12, 0)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(
        query: Any, pool: Any, lengths: Any, tables: Any, starts: Any, count: Any, **options: Any
    ) -> jax.Array:
        sizes = {name: options.pop(f"num_{name}_per_block") for name in ("kv_pages", "queries")}
        assert 0 < sizes["kv_pages"] <= tables.shape[1]
        assert 0 < sizes["queries"] <= len(query)
        assert 0 < count[0] <= len(lengths)
        assert all(lengths[: count[0]] > 0), "a sequence without keys is never waited for"
        assert starts[count[0]] > starts[count[0] - 1] or count[0] == 1, "the last has queries"
        assert starts[count[0]] > starts[0], "a sequence has queries"
        found = np.full(query.shape, np.nan, query.dtype)
        for row in range(int(count[0])):
            begin, end = (int(starts[row + more]) for more in (0, 1))
            if end > begin:
                one = slice(row, row + 1)
                rows = jnp.array([0, end - begin], jnp.int32)
                given = (query[begin:end], pool, lengths[one], tables[one], rows, jnp.array([1], jnp.int32))
                found[begin:end] = of_library.ref_ragged_paged_attention(*given, **options)
        return jnp.asarray(found)

    monkeypatch.setattr(library, "ragged_paged_attention", attention)


def drawn() -> dict[str, Any]:
    """Six sequences, of which some have no queries or no keys, and tokens of none before and behind them."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    return {
        "query": normal(sum(QUERIES) + 5, 4, 128),
        "key_pages": normal(20, 4, 2, 2, 128),
        "value_pages": None,
        "block_tables": jnp.asarray(rng.permutation(20)[:18].reshape(6, 3), jnp.int32),
        "kv_lengths": jnp.asarray(LENGTHS, jnp.int32),
        "query_starts": jnp.asarray(2 + np.cumsum([0, *QUERIES]), jnp.int32),
    }


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": (3, 0), "softcap": 1.5, "scale": 0.3},
        {"query_starts": jnp.array([0, 0, 0, 0, 0, 0, 0])},
        {"query_starts": jnp.array([3, 3, 3, 4, 4, 4, 4])},
        {"query_starts": jnp.array([7, -(2**31), 4, 3, 100, 9, 2**31 - 1])},
        {"kv_lengths": jnp.array([-1, 2**31 - 1, 13, 0, 5, 1])},
        {"block_tables": jnp.full((6, 3), 10**6)},
    ],
    ids=["plain", "options", "no_queries", "one_query", "bad_starts", "bad_lengths", "bad_pages"],
)
def test_what_the_kernel_leaves_is_put_right(options: dict[str, Any]) -> None:
    given = {**drawn(), **options}
    function = lambda: ops.paged_attention(**given, layout="psh2d", implementation="reference")
    call = first_call(function)
    assert RAGGED.default is not None
    config = RAGGED.default(call, V6E)
    assert RAGGED.supports(call, V6E, config) is True
    found, _ = RAGGED.forward(**{"sinks": None, **given, **call.options}, config=config, requested=frozenset())
    np.testing.assert_allclose(found, function(), atol=2e-5)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "v7x:1x1x1"])
@pytest.mark.parametrize("tokens", [16, 512])
def test_it_compiles_without_a_copy_of_the_pool(target: str, tokens: int) -> None:
    sharding = jax.sharding.SingleDeviceSharding(Target(target).devices[0])
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    arrays = {
        "query": struct((tokens, 32, 128), jnp.bfloat16),
        "key_pages": struct((256, 16, 8, 2, 128), jnp.bfloat16),
        "value_pages": None,
        "block_tables": struct((16, 128), jnp.int32),
        "kv_lengths": struct((16,), jnp.int32),
        "query_starts": struct((17,), jnp.int32),
    }
    with use_target(Target(target)):
        called = lambda arrays: ops.paged_attention(**arrays, layout="psh2d", implementation="ragged")
        compiled = jax.jit(called).lower(arrays).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert compiled.memory_analysis().temp_size_in_bytes < 2**22  # of a pool of 2**24
