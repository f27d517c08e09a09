"""The GPU's decoding attention, interpreted, and compiled for GPUs that are not there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.plugins import registries
from stack_core.chips import use_chip
from stack_core.chips.targets import Target, use_target
from stack_kernels.paged_attention.triton_gpu import TRITON_GPU, DecodeTiles, triton_gpu

H100 = registries.chips["h100"]
LENGTHS = np.array([9, 0, 40, 1, 25], np.int32)
SLOTS, PLACES = 4, 16


def call_of(layout: str, **options: object) -> dict[str, object]:
    """Sequences of 9, 0, 40, 1 and 25 keys, in pages whose other slots hold NaN; the last token is padding."""
    rng = np.random.default_rng(0)
    pages = len(LENGTHS) * PLACES + 3
    tables = rng.permutation(pages)[: len(LENGTHS) * PLACES].reshape(-1, PLACES).astype(np.int32)
    pools = np.full((2, pages, SLOTS, 2, 16), np.nan, np.float32)
    for row, length in zip(tables, LENGTHS, strict=True):
        for key in range(length):
            pools[:, row[key // SLOTS], key % SLOTS] = rng.normal(size=(2, 2, 16))
    sizes = jnp.asarray(pools, jnp.bfloat16)
    if layout == "psh2d":
        key, value = jnp.stack(list(sizes), axis=3), None
    else:
        key, value = (jnp.transpose(pool, ["pshd".index(axis) for axis in layout]) for pool in sizes)
    return {
        "query": jnp.asarray(rng.normal(size=(6, 6, 16)), jnp.bfloat16),
        "key_pages": key,
        "value_pages": value,
        "block_tables": jnp.asarray(tables),
        "kv_lengths": jnp.asarray(LENGTHS),
        "query_starts": jnp.array([0, 1, 2, 3, 4, 5]),
        "layout": layout,
        **options,
    }


_SINKS = np.array([0.5, 9.0, -np.inf, 1.0, 0.0, -3.0], jnp.bfloat16)


@pytest.mark.parametrize(
    ("layout", "options", "splits"),
    [
        ("psh2d", {"window": (20, 0), "sinks": _SINKS}, 4),
        pytest.param("pshd", {}, 4, marks=pytest.mark.slow),
        pytest.param("phsd", {"window": (17, 0), "scale": 0.3}, 1, marks=pytest.mark.slow),
        ("hpsd", {"softcap": 1.5, "sinks": _SINKS}, 1),
    ],
)
def test_it_equals_the_reference(layout: str, options: dict[str, object], splits: int) -> None:
    arguments = call_of(
        layout, **{name: jnp.asarray(value) if name == "sinks" else value for name, value in options.items()}
    )
    expected = np.asarray(ops.paged_attention(**arguments, implementation="reference"), np.float32)  # type: ignore[arg-type]
    with use_chip(H100):
        tiled = triton_gpu(interpret=True, tiles=DecodeTiles(16, splits))
        found = ops.paged_attention(**arguments, implementation=tiled)  # type: ignore[arg-type]
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=0, atol=0.02)
    assert not np.asarray(found[5]).any() and np.abs(expected[2]).max() > 0.3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "it takes bfloat16 or float16, not float32"),
        ({"head_dim": 96}, "it takes keys and values of one width among 16, 32, 64, 128, 256, not [96]"),
        ({"tokens": 8}, "it is for decoding, and 8 queries are two or more for each of 4 sequences"),
        ({"pages": 2**19}, "a pool has 2**31 numbers or more"),
    ],
)
def test_what_it_cannot_take_is_refused(changes: dict[str, object], reason: str) -> None:
    call = explained(**changes)
    assert reason in str(dict(call.forward.refused)["triton_gpu"])


def structs(
    *, tokens: int = 4, head_dim: int = 64, pages: int = 512, dtype: str = "bfloat16", sharding: object = None
) -> dict[str, object]:
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[arg-type]
    pool = struct((pages, 16, 64, head_dim), dtype)
    return {
        "query": struct((tokens, 64, head_dim), dtype),
        "key_pages": pool,
        "value_pages": pool,
        "block_tables": struct((4, 128), "int32"),
        "kv_lengths": struct((4,), "int32"),
        "query_starts": struct((5,), "int32"),
        "layout": "pshd",
    }


def explained(**changes: object) -> Any:
    arguments = structs(**changes)  # type: ignore[arg-type]
    layout = arguments.pop("layout")
    (call,) = ops.explain(lambda arrays: ops.paged_attention(**arrays, layout=layout), arguments, chip=H100)
    return call


def test_few_sequences_are_split_over_the_gpu() -> None:
    """64 key heads of 4 sequences are 256 programs, fewer than two for each core of an H100."""
    forward = str(explained().forward)
    assert "triton_gpu" in forward and "splits=2" in forward


@pytest.mark.gpu_aot
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("target", ["a100-80gb:1x1x1", "h100:1x1x1", "b200:1x1x1"])
def test_it_compiles(target: str, head_dim: int) -> None:
    arguments = structs(head_dim=head_dim, sharding=jax.sharding.SingleDeviceSharding(Target(target).devices[0]))
    layout = arguments.pop("layout")
    with use_target(Target(target)):
        run = lambda arrays: ops.paged_attention(**arrays, layout=layout, softcap=30.0, implementation=TRITON_GPU)
        assert "stack_paged_attention" in jax.jit(run).lower(arguments).compile().as_text()
