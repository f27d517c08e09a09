"""The TPU's decoding attention, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_core.testing import OpCheck, op_checks
from stack_kernels.paged_attention.mosaic_tpu import mosaic_tpu

V6E = registries.chips["v6e"]
SLOTS, PLACES = 128, 16


COVERING = ("empty_sequences",)


def _checks() -> list[object]:
    """A few cases in float32 by default: each check compiles the kernel, operation by operation."""
    return [
        check
        if check.aspect == "float32" and check.case.name in COVERING
        else pytest.param(check, marks=pytest.mark.slow)
        for check in op_checks("paged_attention")
        if check.aspect != "float16"
    ]


@pytest.mark.parametrize("check", _checks(), ids=str)
def test_contract(check: OpCheck) -> None:
    with use_chip(V6E):
        check(mosaic_tpu(interpret=True))


@pytest.mark.parametrize(
    ("values", "options"),
    [(True, {"window": (2, 0), "softcap": 1.5, "scale": 0.3}), (False, {"value_dim": 5, "window": (6, None)})],
)
@pytest.mark.parametrize("has_sinks", [True, False])
def test_options_of_decoding(values: bool, options: dict[str, object], has_sinks: bool) -> None:
    """Of sequences of 9, 0, 4, 1 and 12 keys, in pages whose other slots hold NaN."""
    rng = np.random.default_rng(0)
    lengths, slots = np.array([9, 0, 4, 1, 12], np.int32), 4
    tables = rng.permutation(20).reshape(5, 4).astype(np.int32)
    pool = np.full((20, 2, slots, 8), np.nan, np.float32)
    for row, length in zip(tables, lengths, strict=True):
        for key in range(length):
            pool[row[key // slots], :, key % slots] = rng.normal(size=(2, 8))
    arrays = {
        "query": jnp.asarray(rng.normal(size=(6, 4, 8)), jnp.float32),
        "key_pages": jnp.asarray(pool),
        "value_pages": jnp.asarray(pool[:, :, :, ::-1]) if values else None,
        "block_tables": jnp.asarray(tables),
        "kv_lengths": jnp.asarray(lengths),
        "query_starts": jnp.array([0, 1, 2, 3, 4, 5]),
        "sinks": jnp.array([0.5, 1.0, -jnp.inf, jnp.nan]) if has_sinks else None,
    }
    call = lambda implementation: ops.paged_attention(**arrays, **options, implementation=implementation)  # type: ignore[arg-type]
    with use_chip(V6E):
        found = call(mosaic_tpu(interpret=True))
    np.testing.assert_allclose(found, call("reference"), rtol=1e-5, atol=1e-5)


@pytest.mark.tpu_aot
@pytest.mark.parametrize("target", ["v5e:1x1", "v5p:1x1x1", "v6e:1x1", "v7x:1x1x1"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "options"),
    [
        (32, 8, 128, {}),
        (64, 8, 64, {"window": (127, 0), "softcap": 30.0}),
        (128, 1, 576, {"value_dim": 512}),
    ],
)
def test_decoding_compiles(target: str, heads: int, kv_heads: int, head_dim: int, options: dict[str, object]) -> None:
    sharding = jax.sharding.SingleDeviceSharding(Target(target).devices[0])
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    pool = struct((256, kv_heads, SLOTS, head_dim), jnp.bfloat16)
    arguments = {
        "query": struct((16, heads, head_dim), jnp.bfloat16),
        "key_pages": pool,
        "value_pages": None if "value_dim" in options else pool,
        "block_tables": struct((16, PLACES), jnp.int32),
        "kv_lengths": struct((16,), jnp.int32),
        "query_starts": struct((17,), jnp.int32),
        "sinks": struct((heads,), jnp.float32) if "window" in options else None,
    }
    with use_target(Target(target)):
        call = lambda arrays: ops.paged_attention(**arrays, **options, implementation="mosaic_tpu")  # type: ignore[arg-type]
        compiled = jax.jit(call).lower(arguments).compile()
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.parametrize(("kv_heads", "takes"), [(192, False), (8, True)])
def test_narrow_heads_take_whole_tiles_of_vmem(kv_heads: int, takes: bool) -> None:
    query, pages, tables, lengths, starts = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((4, kv_heads, 1), jnp.float32),
            ((8, kv_heads, 128, 1), jnp.float32),
            ((4, 2), jnp.int32),
            ((4,), jnp.int32),
            ((5,), jnp.int32),
        )
    )
    with use_chip(registries.chips["v6e"]):
        (decision,) = ops.explain(
            lambda *arrays: ops.paged_attention(
                *arrays[:3], block_tables=arrays[3], kv_lengths=arrays[4], query_starts=arrays[5]
            ),
            query,
            pages,
            pages,
            tables,
            lengths,
            starts,
        )
    refused = dict(decision.forward.refused).get("mosaic_tpu", "")
    assert refused.endswith("do not fit into VMEM") != takes
