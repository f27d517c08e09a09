"""How long devices talk, how much of it nothing hides, along which axis, and how fast; known by hand and captured."""

import subprocess
import sys

import pytest

from stack_core.abi.errors import UnknownName
from stack_profile.analyses.communication import communication
from stack_profile.errors import ProfileError
from stack_profile.traces.trace import load_trace, trace_of
from stack_profile.traces.xplane import read_space

GATHERED_BYTES = 64 * 4 * 4


def test_an_asynchronous_collective_lasts_until_its_end_and_is_exposed_where_it_is_alone(tpu_trace):
    rows = {row.name: row for row in communication(tpu_trace).rows}
    gather = rows["jit_step: all-gather-start.1"]
    assert (gather.kind, gather.axis, gather.occurrences) == ("all-gather", "fsdp", 4)
    assert gather.time_s == pytest.approx(4 * 70e-6)
    assert gather.exposed_s == pytest.approx(4 * 10e-6)
    assert not any("done" in name for name in rows)


def test_facts_say_what_of_the_busy_time_is_communication_and_what_nothing_hides(tpu_trace):
    facts = communication(tpu_trace).facts
    busy_us = 4 * 100 - 2 * 5
    assert facts["busy_s"] == pytest.approx(busy_us * 1e-6)
    assert facts["communication_s"] == pytest.approx((busy_us) * 1e-6)
    assert facts["exposed_s"] == pytest.approx((busy_us - 4 * 60) * 1e-6)
    assert facts["exposed_busy_share"] == pytest.approx((busy_us - 4 * 60) / busy_us)
    assert facts["sent_bytes"] == sum(row.sent_bytes for row in communication(tpu_trace, by="kind").rows)


def test_who_comes_first_waits_and_the_rate_is_of_the_rest(tpu_trace):
    (reduce,) = (row for row in communication(tpu_trace).rows if row.kind == "all-reduce")
    assert (reduce.axis, reduce.array_bytes, reduce.sent_bytes) == ("tensor", 2 * 256, 2 * 256)
    assert reduce.time_s == pytest.approx(2 * (20 + 15) * 1e-6)
    assert reduce.wait_s == pytest.approx(2 * 5e-6)
    assert reduce.rate_bytes_s == pytest.approx(256 / 15e-6)
    links = communication(tpu_trace).facts["link_bytes_s"]
    assert reduce.link_share == pytest.approx(256 / 15e-6 / links)


def test_a_collective_in_a_fusion_is_one(tpu_trace):
    rows = {row.name: row for row in communication(tpu_trace, by="axis").rows}
    assert rows["fsdp"].kind in ("all-gather, reduce-scatter", "reduce-scatter, all-gather")
    assert rows["fsdp"].sent_bytes == 2 * 2 * GATHERED_BYTES * 3 / 4


def test_axes_may_be_named_by_hand(tpu_trace):
    assert {row.name for row in communication(tpu_trace, by="axis", mesh="a=2,b=2,c=2").rows} == {"a, b", "c"}
    with pytest.raises(ProfileError, match="not of the form"):
        communication(tpu_trace, mesh="fsdp:8")
    with pytest.raises(ProfileError, match="has 4 devices, the trace 8"):
        communication(tpu_trace, mesh="fsdp=4")
    with pytest.raises(UnknownName, match="v9"):
        communication(tpu_trace, chip="v9")


def test_kernels_of_a_stream_of_their_own_are_hidden_by_those_beside_them(build):
    plane = build.plane("/device:GPU:0")
    both = {"hlo_module": "jit_f", "program_id": 1}
    plane.line("Stream #1", plane.event("gemm", 0, 50, hlo_op="dot.1", **both))
    plane.line("Stream #2", plane.event("nccl", 20, 50, hlo_op="all-reduce-start.3", **both))
    answer = communication(trace_of([read_space(build.space(plane))]))
    (row,) = answer.rows
    assert (row.time_s, row.exposed_s) == (pytest.approx(50e-6), pytest.approx(20e-6))
    assert (row.kind, row.sent_bytes, row.wait_s, row.rate_bytes_s) == ("all-reduce", None, None, None)
    assert any("have only names" in note for note in answer.notes)
    assert any("one device" in note for note in answer.notes)


def test_two_at_one_time_share_what_nothing_hides(build):
    plane = build.plane("/device:GPU:0")
    both = {"hlo_module": "jit_f", "program_id": 1}
    plane.line("Stream #1", plane.event("nccl", 0, 40, hlo_op="all-reduce.1", **both))
    plane.line("Stream #2", plane.event("nccl", 0, 40, hlo_op="all-gather.1", **both))
    answer = communication(trace_of([read_space(build.space(plane))]))
    assert [row.exposed_s for row in answer.rows] == pytest.approx([20e-6, 20e-6])
    assert answer.facts["communication_s"] == answer.facts["exposed_s"] == pytest.approx(40e-6)


def test_none_is_zero_and_nothing_is_no_data(trace, build):
    answer = communication(trace)
    assert (answer.facts["exposed_s"], answer.facts["sent_bytes"], answer.facts["occurrences"]) == (0.0, 0.0, 0)
    assert "zero" in answer.notes[0]
    empty = communication(trace_of([read_space(build.space(build.plane("/host:CPU")))]))
    assert empty.facts == {"devices": 0} and "No data" in empty.notes[0]


SCRIPT = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import stack_profile

mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
def sharded(array, *names):
    return jax.device_put(array, NamedSharding(mesh, P(*names)))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P("fsdp"), P("fsdp", "tensor"), P("tensor", "fsdp")), out_specs=P("fsdp"))
def mlp(x, up, down):
    with jax.named_scope("mlp"):
        up = jax.lax.all_gather(up, "fsdp", axis=0, tiled=True)
        down = jax.lax.all_gather(down, "fsdp", axis=1, tiled=True)
        return jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor")

x = sharded(jnp.ones((16, 32)), "fsdp")
weights = sharded(jnp.ones((32, 64)), "fsdp", "tensor"), sharded(jnp.ones((64, 32)), "tensor", "fsdp")
mlp(x, *weights).block_until_ready()
with stack_profile.capture(sys.argv[1]):
    for _ in range(3):
        mlp(x, *weights).block_until_ready()
"""


def test_a_sharded_product_talks_along_both_axes(tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=True, capture_output=True)
    loaded = load_trace(tmp_path)
    assert loaded.about["meshes"] == [{"fsdp": 4, "tensor": 2}]
    rows = {row.name: row for row in communication(loaded, by="axis").rows}
    assert {name: row.kind for name, row in rows.items()} == {"fsdp": "all-gather", "tensor": "all-reduce"}
    steps, float32_bytes = 3, 4
    weights_bytes = 2 * 32 * 32 * float32_bytes
    assert rows["fsdp"].sent_bytes == steps * weights_bytes * 3 / 4
    assert rows["tensor"].sent_bytes == steps * 4 * 32 * float32_bytes
    assert rows["fsdp"].occurrences == steps * 2 * 8
    facts = communication(loaded).facts
    rounding = 1 + 1e-9  # the sum of the rows' exposed times is not rounded as that of all is
    assert 0 < facts["exposed_s"] <= rounding * facts["communication_s"] <= rounding**2 * facts["busy_s"]
    assert 0 <= facts["wait_s"] < facts["communication_s"]
    assert "mlp" in {row.name for row in communication(loaded, by="layer").rows}
