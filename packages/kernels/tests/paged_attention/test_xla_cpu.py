import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.abi.errors import UnsupportedOp
from stack_core.testing import OpCheck, op_checks
from stack_kernels.paged_attention.xla_cpu import XLA_CPU, StepConfig

SLOTS, LENGTHS = 2, (23, 0, 1, 40, 9)
TWO_PAGES_A_STEP = dataclasses.replace(XLA_CPU, default=lambda call, chip: StepConfig(slots=5))


@pytest.mark.covering
@pytest.mark.parametrize("check", op_checks("paged_attention"), ids=str)
def test_contract(check: OpCheck) -> None:
    check(XLA_CPU)


def decoding(
    lengths: tuple[int, ...] = LENGTHS, dtype: Any = jnp.float32, kv_heads: int = 2, head_dim: int = 8
) -> dict[str, Any]:
    """One query a sequence that has keys, of 4 heads, and one more that is padding; what nobody needs is NaN."""
    rng = np.random.default_rng(0)
    used = [-(-length // SLOTS) for length in lengths]
    numbers = iter(rng.permutation(sum(used)))
    tables = np.full((len(lengths), max(used) + 1), 10**6, np.int32)
    pools = np.full((2, sum(used), SLOTS, kv_heads, head_dim), np.nan)
    for row, length in zip(tables, lengths, strict=True):
        row[: -(-length // SLOTS)] = [next(numbers) for _ in range(-(-length // SLOTS))]
        for key in range(length):
            pools[:, row[key // SLOTS], key % SLOTS] = rng.normal(size=(2, kv_heads, head_dim))
    queries = [int(length > 0) for length in lengths]
    return {
        "query": jnp.asarray(rng.normal(size=(sum(queries) + 1, 4, head_dim)), dtype),
        "key_pages": jnp.asarray(pools[0], dtype),
        "value_pages": jnp.asarray(pools[1], dtype),
        "block_tables": jnp.asarray(tables),
        "kv_lengths": jnp.asarray(lengths, jnp.int32),
        "query_starts": jnp.asarray(np.cumsum([0, *queries]), jnp.int32),
        "layout": "pshd",
    }


OPTIONS = {
    "plain": {},
    "window_over_steps": {"window": (11, None)},
    "all_options": {"window": (20, 3), "softcap": 2.0, "scale": 0.5, "sinks": jnp.arange(4.0)},
}


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_several_pages_a_step_give_what_the_reference_gives(options: dict[str, Any], dtype: Any) -> None:
    operands = decoding(dtype=dtype)
    ours, reference = (
        jax.jit(lambda by=by: ops.paged_attention(**operands, **options, implementation=by))()
        for by in (TWO_PAGES_A_STEP, "reference")
    )
    assert ours.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (ours, reference)), atol=tolerance)
    assert not ours[-1].any()


@pytest.mark.parametrize("layout", ["phsd", "hpsd", "pshd"])
def test_heads_with_a_key_head_of_their_own_take_every_layout(layout: str) -> None:
    operands = decoding(kv_heads=4, head_dim=128)
    pools = {
        name: operands[name].transpose(["pshd".index(axis) for axis in layout]) for name in ("key_pages", "value_pages")
    }
    operands |= {**pools, "layout": layout, "sinks": jnp.arange(4.0)}
    ours, reference = (ops.paged_attention(**operands, implementation=by) for by in (XLA_CPU, "reference"))
    np.testing.assert_allclose(ours, reference, atol=1e-5)


def test_two_queries_of_one_sequence_stand_one_key_apart() -> None:
    operands = decoding((13, 6)) | {"query_starts": jnp.array([0, 2, 3], jnp.int32)}
    ours, reference = (ops.paged_attention(**operands, implementation=by) for by in (XLA_CPU, "reference"))
    np.testing.assert_allclose(ours, reference, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"layout": "phsd"}, "layout 'phsd'"),
        ({"query": jnp.zeros((4, 4, 8))}, "4 queries are two or more for each of 2 sequences"),
        (decoding((8, 6), kv_heads=2, head_dim=256), "512 wide"),
        (decoding((8, 6), kv_heads=4), "heads of 8"),
    ],
    ids=["layout", "prompts", "wide", "narrow"],
)
def test_calls_that_the_reference_runs_faster_are_left_to_it(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedOp, match=reason):
        ops.paged_attention(**decoding((8, 6)) | changed, implementation=XLA_CPU)
