import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.ops import OpImplementation
from stack_core.testing import OpCheck, op_checks
from stack_kernels.attention.xla_cpu import XLA_CPU, TileConfig


def _in_tiles(config: TileConfig) -> OpImplementation:
    return dataclasses.replace(XLA_CPU, default=lambda call, chip: config)


SMALL_TILES = _in_tiles(TileConfig(rows=16, tile_bytes=2**13))


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("attention"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


def _normal(seed: int, *shape: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape)


OPTIONS = {
    "laid_out_one_by_one": (100, {"causal": True, "window": (40, None)}),
    "loops": (
        203,
        {
            "bias": _normal(3, 1, 4, 203, 301),
            "segment_ids": (jnp.arange(203)[None].repeat(2, 0) // 70, jnp.arange(301)[None].repeat(2, 0) // 90),
            "kv_lengths": jnp.array([250, 0]),
            "softcap": 3.0,
            "window": (90, 60),
        },
    ),
    "first_queries_alone_see_keys": (100, {"window": (4, 0), "query_offset": 290}),
    "offset_per_row": (203, {"causal": True, "query_offset": jnp.array([98, -20]), "sinks": jnp.ones(4)}),
}
FEW_KEYS = {
    "laid_out_one_by_one": (100, {"causal": True, "query_offset": 10}),
    "loops": (203, {"bias": _normal(3, 1, 4, 203, 30), "window": (90, 60)}),
}

SINKS = jnp.array([1, -jnp.inf, 1, -jnp.inf])  # the second batch row below has no keys, and two heads no sink either

ONE_TILE = {
    "all_batch_rows": (TileConfig(), {"kv_lengths": jnp.array([20, 0]), "softcap": 3.0, "sinks": SINKS}),
    "batch_row_by_batch_row": (TileConfig(tile_bytes=2**13), {"bias": _normal(3, 2, 4, 25, 30), "window": (6, 2)}),
    "rows_out_of_range": (TileConfig(), {"causal": True, "query_offset": jnp.array([2**31 - 1, -(2**31)])}),
    "keys_that_causality_leaves": (TileConfig(), {"bias": _normal(3, 1, 1, 25, 30), "causal": True}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_many_blocks_and_tiles_give_what_the_reference_gives(case: str) -> None:
    _check_against_reference(*OPTIONS[case], kv_seq=301, head_dim=8)


@pytest.mark.parametrize("case", FEW_KEYS)
def test_keys_so_few_that_weights_are_transposed(case: str) -> None:
    _check_against_reference(*FEW_KEYS[case], kv_seq=30, head_dim=64)


@pytest.mark.covering
@pytest.mark.parametrize("case", ONE_TILE)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_one_tile_whose_weights_are_formed_again_or_kept(case: str, head_dim: int) -> None:
    config, options = ONE_TILE[case]
    _check_against_reference(25, options, kv_seq=30, head_dim=head_dim, implementation=_in_tiles(config))


def test_few_weights_are_kept() -> None:
    """No exponential is computed for the gradient."""

    def exponentials(head_dim: int) -> int:
        query, key, value = (_normal(seed, 2, 30, 4, head_dim) for seed in range(3))
        _, vjp = jax.vjp(
            lambda *operands: ops.attention(*operands, causal=True, implementation=XLA_CPU), query, key, value
        )
        return jax.jit(vjp).lower(query).compile().as_text().count(" exponential(")

    assert exponentials(64) == 0
    assert exponentials(8) > 0


@pytest.mark.parametrize(("causal", "tiles"), [(False, 1), (True, 4)])
def test_only_queries_that_see_many_keys_take_large_tiles(causal: bool, tiles: int) -> None:
    operand = _normal(0, 1, 512, 2, 16)
    program = jax.jit(lambda x: ops.attention(x, x, x, causal=causal, implementation=XLA_CPU))
    assert program.lower(operand).as_text().count("stablehlo.dot_general") == 2 * tiles


def _check_against_reference(
    q_seq: int,
    options: dict[str, Any],
    *,
    kv_seq: int,
    head_dim: int,
    implementation: OpImplementation = SMALL_TILES,
) -> None:
    moving = {"query": _normal(0, 2, q_seq, 4, head_dim)}
    moving |= {name: _normal(seed, 2, kv_seq, 2, head_dim) for seed, name in ((1, "key"), (2, "value"))}
    moving |= {name: options[name] for name in ("bias", "sinks") if name in options}

    def value_and_gradients(implementation: Any) -> Any:
        def call(moving: Any) -> Any:
            output, lse = ops.attention(**{**options, **moving}, return_lse=True, implementation=implementation)
            return output, jnp.where(jnp.isfinite(lse), lse, 0)

        output, vjp = jax.vjp(call, moving)
        return output, vjp(jax.tree.map(jnp.cos, output))

    ours, theirs = (jax.jit(lambda by=by: value_and_gradients(by))() for by in (implementation, "reference"))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), ours, theirs)
