"""Mixtures of experts on meshes of eight devices; `test_on_eight_devices.py` runs this in a process that has eight.

The argument `all` adds the other meshes to the one that splits rows and experts.
"""

import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from stack_core.abi.mesh import DEFAULT_RULES, MeshConfig, use_mesh
from stack_core.abi.plugins import registries
from stack_core.chips.device_mesh import make_mesh
from stack_core.programs.hlo import parse_hlo
from stack_core.programs.hlo_costs import instruction_flops
from stack_train.models.qwen3_moe import Qwen3MoeConfig

CONFIG = Qwen3MoeConfig(
    vocab_size=48,
    layers=2,
    embed=16,
    heads=4,
    kv_heads=2,
    mlp=32,
    max_positions=16,
    dtype="float32",
    initializer_std=0.2,
    experts=16,  # at least two for a device: XLA removes a loop with one trip, which `flops` would count
    active_experts=3,
    expert_mlp=24,
)
MESHES = (
    {"fsdp": 2, "expert": 2},
    {"fsdp": 2, "expert": 4},
    {"expert": 8},
    {"data": 2, "expert": 2, "tensor": 2},
    {"fsdp": 8},
)
# Parameters outside of the experts are split over the devices of the experts as well.
FULLY_SPLIT = DEFAULT_RULES.updated({"embed": ("fsdp", "expert"), "lookup_batch": "data"})
MOST_WORK = 1.1  # of a device's even share of the FLOPs
ROWS, SEQ = 8, 12


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, CONFIG.vocab_size, (ROWS, SEQ), dtype=np.int32)
    segments = np.ones((ROWS, SEQ), np.int32)
    segments[0, SEQ // 2 :] = 0
    # Half of the rows replay other experts than their own.
    experts = rng.random((ROWS, SEQ, 2, CONFIG.experts)).argsort()[..., : CONFIG.active_experts].astype(np.int16)
    experts[ROWS // 2 :] = -1
    return tokens, np.broadcast_to(np.arange(SEQ, dtype=np.int32), tokens.shape), segments, experts


def loss(model, tokens, positions, segments, experts):
    outputs = model(tokens, positions, segments, experts=experts)
    targets = jnp.where(segments == 0, -100, tokens)
    facts = outputs.facts
    cross_entropy = model.head().cross_entropy(outputs.hidden, targets)
    return cross_entropy + 0.1 * facts["balance_loss"] + 0.01 * facts["router_z"], facts


def results(model, sizes, rules=DEFAULT_RULES):
    """The loss, the facts and the gradients, computed on a mesh, and the FLOPs of a device."""
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    graph, state = nnx.split(model)
    axes = {path: leaf.get_metadata("logical_axes") for path, leaf in nnx.to_flat_state(state)}
    params = nnx.to_pure_dict(state)
    shardings = rules.tree_shardings(mesh, params, nnx.traversals.unflatten_mapping(axes))
    inputs = [rules.sharding(mesh, ("batch", *[None] * (x.ndim - 1)), x.shape) for x in batch()]

    def function(params, *arrays):
        with use_mesh(mesh, rules):
            return loss(nnx.merge(graph, nnx.State(params)), *arrays)

    compiled = jax.jit(
        jax.value_and_grad(function, has_aux=True),
        in_shardings=(shardings, *inputs),
        out_shardings=(None, shardings),
    )
    arrays = jax.device_put((params, *batch()), (shardings, *inputs))
    compiled = compiled.lower(*arrays).compile()
    (value, facts), gradients = compiled(*arrays)
    layer = jax.device_put(params, shardings)["blocks"][0][0]
    for kernel, axes in (
        (layer["feed_forward"]["expert_up"], ("fsdp", "expert", "tensor")),
        (layer["attention"]["query"]["kernel"], ("tensor", *rules.mesh_axes("embed"))),
    ):
        parts = math.prod(sizes.get(axis, 1) for axis in axes)
        assert kernel.addressable_shards[0].data.size == kernel.size // parts
    return *jax.device_get((value, facts, gradients)), flops_beside_the_experts(compiled.as_text())


def flops_beside_the_experts(program):
    """The experts' products are in loops within the loop over layers, over the rows for which a device has room."""
    executions = [each for each in parse_hlo(program).executions() if len(each.loops) < 2]
    return sum(instruction_flops(each.instruction, each.computation).total * each.times for each in executions)


if __name__ == "__main__":
    model = jax.jit(lambda: registries.models["qwen3_moe"].build(CONFIG, key=jax.random.key(0)))()
    value, facts, gradients, flops = results(model, {"data": 1})
    assert facts["expert_load"].shape == (2, 16) and facts["routing_mismatch"] > 0.9
    meshes = MESHES if "all" in sys.argv else MESHES[:1]
    for sizes, rules in [*((sizes, DEFAULT_RULES) for sizes in meshes), ({"fsdp": 2, "expert": 2}, FULLY_SPLIT)]:
        found, found_facts, found_gradients, found_flops = results(model, sizes, rules)
        np.testing.assert_allclose(found, value, rtol=1e-5, err_msg=str(sizes))
        assert found_facts.pop("dropped", 0) == 0, sizes
        for name, fact in facts.items():
            np.testing.assert_allclose(found_facts[name], fact, rtol=1e-5, atol=1e-7, err_msg=f"{name}, {sizes}")
        for left, right in zip(jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * np.abs(right).max(), err_msg=str(sizes))
        assert found_flops <= MOST_WORK * flops / math.prod(sizes.values()), (sizes, found_flops, flops)
