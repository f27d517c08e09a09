"""Checks of `ring_attention` that need eight devices; `test_on_eight_devices.py` runs them where there are."""

import sys
import unittest

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from stack_core import ops
from stack_core.ops.definitions.ring_attention import REFERENCE
from stack_core.ops.references import attention_tiles
from stack_core.programs.hlo import parse_hlo
from stack_core.testing import op_checks

MESH = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
SPLIT = P("data", "context")


FEW = ("contiguous_over_8", "kv_lengths_over_4", "not_a_number_over_2", "everything_over_4")
"""The contract's cases without `all`, in fp32: together they have every option."""


def the_contract_holds():
    skipped = set()
    for check in op_checks("ring_attention"):
        if "all" in sys.argv or (check.case.name in FEW and check.aspect == "float32"):
            try:
                check(REFERENCE)
            except unittest.SkipTest:
                skipped.add(check.case.name)
    assert skipped == ({"contiguous_over_3"} if "all" in sys.argv else set()), skipped


def on_four(check_vma=True):
    def attend(query, key, value):
        return ops.ring_attention(query, key, value, axis_name="context", causal=True)

    return jax.shard_map(attend, mesh=MESH, in_specs=(SPLIT,) * 3, out_specs=SPLIT, check_vma=check_vma)


def operands(seq=32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(2, seq, heads, 8)), jnp.float32) for heads in (4, 2, 2))


def the_gradient_keeps_no_keys_of_other_devices():
    drawn = operands()
    for check_vma in (True, False):
        _, kept = jax.eval_shape(lambda *drawn, vma=check_vma: jax.vjp(on_four(vma), *drawn), *drawn)
        # The operands, the output and the lse, each once.
        most = 2 * drawn[0].size + 2 * drawn[1].size + drawn[0].size // 8
        assert sum(leaf.size for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.float32) <= most


def keys_travel_one_time_less_than_there_are_devices():
    text = jax.jit(on_four()).lower(*operands()).compile().as_text()
    moves = [each for each in parse_hlo(text).executions() if each.instruction.operation == "collective-permute"]
    assert sum(each.times * len(each.instruction.shapes) for each in moves) in (2 * 3, 2 * 2 * 3), moves


def pairs_of_blocks_that_causality_hides_are_skipped():
    """Keys of a hidden block are not read: NaN there stays there, and no score of it is formed."""
    query, key, value = operands()
    whole = ops.attention(query, key, value, causal=True)
    visited = []
    plain = attention_tiles.attend
    attention_tiles.attend = lambda operands, **options: (
        jax.debug.callback(lambda: visited.append(1)) or plain(operands, **options)
    )
    jax.clear_caches()  # an equal call is not traced again
    try:
        blocks = np.split(np.arange(32), 8)
        order = np.concatenate([blocks[place] for device in range(4) for place in (device, 7 - device)])
        found = jax.jit(on_four(check_vma=False))(*(x[:, order] for x in (query, key, value)))
        jax.effects_barrier()
    finally:
        attention_tiles.attend = plain
        jax.clear_caches()
    np.testing.assert_allclose(found[:, np.argsort(order)], whole, rtol=1e-5, atol=1e-6)
    # Of 64 pairs of blocks, 36 are on or below the diagonal, in each of the two rows of devices.
    assert len(visited) == 2 * 36, len(visited)


if __name__ == "__main__":
    for check in [value for value in globals().values() if getattr(value, "__module__", None) == __name__]:
        if not check.__code__.co_argcount and check.__name__ != "operands":
            check()
