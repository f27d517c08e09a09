"""FLOPs and bytes by hand, and by counting pairs one at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core import ops
from stack_core.chips import Chip
from stack_core.testing import op_checks
from stack_kernels.bench.cases import Int8
from stack_kernels.roofline import Work, work_of

CHIP = Chip(
    kind="toy",
    unit="device",
    peak_flops={"bfloat16": 100e9, "int8": 200e9},
    hbm_bytes=None,
    hbm_bandwidth_bytes_s=10e9,
    on_chip_bytes=None,
    link_bandwidth_bytes_s=None,
    provenance="by hand",
)


def works(function, *arrays, values=None):
    """The work of the one op call in a function, forward and backward."""
    (explained,) = ops.explain(function, *arrays)
    backward = dataclasses.replace(explained.call, direction="backward")
    return work_of(explained.call, values), work_of(backward, values)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_a_product_and_its_two_gradients():
    forward, backward = works(ops.linear, struct(6, 4), struct(4, 10))
    assert forward == Work(2 * 6 * 4 * 10, "bfloat16", 2 * (24 + 40 + 60))
    assert backward == Work(2 * forward.flops, "bfloat16", 2 * (24 + 40 + 60) + 2 * (24 + 40))


def test_codes_are_small_and_have_no_gradient():
    weight = Int8(struct(4, 10, dtype=jnp.int8), struct(1, 10, dtype=jnp.float32))
    forward, backward = works(ops.linear, struct(6, 4), weight)
    assert forward == Work(2 * 6 * 4 * 10, "bfloat16", 2 * 24 + 40 + 4 * 10 + 2 * 60)
    assert backward.flops == forward.flops
    x = Int8(struct(6, 4, dtype=jnp.int8), struct(6, 1, dtype=jnp.float32))
    assert works(ops.linear, x, weight)[0].dtype == "int8"
    nibbles = Int8(struct(4, 10, dtype=jnp.int4), struct(1, 10, dtype=jnp.float32))
    assert works(ops.linear, struct(6, 4), nibbles)[0].traffic_bytes == forward.traffic_bytes - 20


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window": (3, None)},
        {"window": (2, 1)},
        {"causal": True, "query_offset": -2},
        {"causal": True, "query_offset": 30},
    ],
)
def test_attention_counts_the_pairs_that_may_attend(options):
    q_seq, kv_seq = 5, 11
    query, key = struct(2, q_seq, 4, 8), struct(2, kv_seq, 2, 8)
    forward, backward = works(lambda *x: ops.attention(*x, **options), query, key, key)
    left, right = options.get("window", (None, None))
    places = [(i + options.get("query_offset", kv_seq - q_seq), j) for i, j in np.ndindex(q_seq, kv_seq)]
    seen = sum(
        (not options.get("causal") or j <= p) and (left is None or j >= p - left) and (right is None or j <= p + right)
        for p, j in places
    )
    assert forward.flops == 2 * 2 * 8 * seen * 2 * 4
    assert backward.flops == 2.5 * forward.flops


def test_lengths_say_how_much_there_is_to_do():
    arrays = {
        "query": struct(6, 4, 8),
        "key_pages": struct(20, 2, 4, 8),
        "value_pages": struct(20, 2, 4, 8),
        "block_tables": struct(3, 10, dtype=jnp.int32),
        "kv_lengths": struct(3, dtype=jnp.int32),
        "query_starts": struct(4, dtype=jnp.int32),
    }

    def paged(arrays):
        return ops.paged_attention(**arrays)

    values = {"kv_lengths": np.array([7, 3, 12]), "query_starts": np.array([0, 1, 1, 4])}
    forward, _ = works(paged, arrays, values=values)
    pairs = 7 + (10 + 11 + 12)  # the second sequence has no query, the last two tokens are padding
    assert forward.flops == 4 * 8 * 4 * pairs
    pages_bytes = 2 * 2 * (7 + 12) * 2 * 8
    assert forward.traffic_bytes == pages_bytes + 2 * (2 * 6 * 4 * 8) + 4 * (30 + 3 + 4)
    assert works(paged, arrays)[0].flops > forward.flops, "without values it is as much as fits"


def test_rows_of_no_group_are_no_work():
    arrays = struct(20, 4), struct(3, 4, 6), struct(3, dtype=jnp.int32)
    assert works(ops.ragged_dot, *arrays)[0].flops == 2 * 20 * 4 * 6
    forward, backward = works(ops.ragged_dot, *arrays, values={"group_sizes": np.array([5, 0, 7])})
    assert (forward.flops, backward.flops) == (2 * 12 * 4 * 6, 4 * 12 * 4 * 6)


def test_the_loss_forms_its_logits_twice_and_two_gradients():
    forward, backward = works(ops.linear_cross_entropy, struct(6, 4), struct(4, 100), struct(6, dtype=jnp.int32))
    assert (forward.flops, backward.flops) == (2 * 6 * 4 * 100, 3 * 2 * 6 * 4 * 100)


def test_elementwise_ops_are_bound_by_memory():
    forward, _ = works(lambda x, y: ops.norm(x, residual=y), struct(6, 4), struct(6, 4))
    assert (forward.flops, forward.traffic_bytes) == (0, 4 * 2 * 24)
    assert forward.bound(CHIP).denominator == "10 GB/s"


@pytest.mark.parametrize("op", ["gated_linear_unit", "linear_attention", "state_space", "rope", "attention", "norm"])
def test_every_call_of_the_contract_has_its_work(op):
    for case in {check.case.name: check.case for check in op_checks(op)}.values():
        arrays = {
            name: jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if x.dtype == float else x.dtype), x
            )
            for name, x in case.arrays(np.random.default_rng(0)).items()
        }
        forward, backward = works(lambda arrays, case=case: getattr(ops, op)(**arrays, **case.options), arrays)
        assert 0 <= forward.flops <= backward.flops
        assert 0 <= forward.traffic_bytes <= backward.traffic_bytes


def test_the_peak_that_takes_longer_decides():
    assert Work(10**9, "bfloat16", 10**6).bound(CHIP).seconds == pytest.approx(1e-2)
    assert Work(10**9, "bfloat16", 10**6).bound(CHIP).denominator == "100 GFLOP/s bfloat16"
    assert Work(10**6, "bfloat16", 10**9).bound(CHIP).seconds == pytest.approx(1e-1)
    fast = dataclasses.replace(CHIP, peak_flops={"bfloat16": 989.4e12})
    assert Work(10**18, "bfloat16", 1).bound(fast).denominator == "989 TFLOP/s bfloat16"


def test_a_peak_that_is_not_known_is_no_zero():
    assert Work(10**9, "float16", 10**6).bound(CHIP) is None
    assert Work(0, "float16", 10**6).bound(CHIP) is not None
    assert Work(10**9, "bfloat16", 10**6).bound(dataclasses.replace(CHIP, hbm_bandwidth_bytes_s=None)) is None
