"""Layers name the axes of their calls; `test_on_eight_devices.py` runs this in a process that has them.

Implementations that XLA cannot split stand in for all references. They are refused a mesh unless a call says how its
operands are split, and each device runs them on its part.
"""

import dataclasses
import functools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from stack_core.abi.mesh import DEFAULT_RULES, MeshConfig, use_mesh
from stack_core.abi.ops import OWN
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops.dispatch.op import op_named
from stack_train.models.deepseek_v3 import DeepseekV3Config
from stack_train.models.qwen3_next import Qwen3NextConfig

SIZES = {"vocab_size": 48, "embed": 16, "heads": 4, "max_positions": 16, "dtype": "float32", "initializer_std": 0.2}
EXPERTS = {"experts": 4, "active_experts": 2, "expert_mlp": 8}
LATENT = {"query_rank": 8, "kv_rank": 8, "nope_dim": 4, "rope_dim": 4, "value_dim": 4}
DELTA = {"period": 2, "value_heads": 4, "key_dim": 4, "value_dim": 4, "shared_mlp": 24}
CONFIGS = (
    DeepseekV3Config(**SIZES, **EXPERTS, **LATENT, layers=1, mlp=24),
    Qwen3NextConfig(**SIZES, **EXPERTS, **DELTA, layers=2, kv_heads=2, head_dim=8),
)
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
ROWS, SEQ = 8, 12
# What a device gets of one operand of each op: a quarter of the rows, by half of the heads or of the columns.
PARTS = {
    "attention": ("query", {(2, 12, 2, 8)}),
    "gated_linear_unit": ("w_gate", {(16, 12)}),
    "linear": ("x", {(2, 12, 16), (2, 12, 8), (2, 12, 12), (24, 16)}),
    "linear_attention": ("query", {(2, 12, 2, 4)}),
    "linear_cross_entropy": ("hidden", {(2, 12, 16)}),
    "norm": ("x", {(2, 12, 16), (2, 12, 8), (2, 12, 2, 8), (2, 12, 1, 8), (2, 12, 2, 4)}),
    "rope": ("x", {(2, 12, 2, 8), (2, 12, 1, 8), (2, 12, 2, 4), (2, 12, 1, 4)}),
}


def opaque(op, seen):
    """The reference as an implementation that XLA cannot split; `seen` gets the shapes that it is asked about."""
    reference = op_named(op).implementation()

    def supports(call, chip, config):
        seen.setdefault(op, set()).add(call.arrays[PARTS[op][0]].shape)
        return True

    kept = tuple(name for name in reference.residuals if name != OWN)
    changed = {"name": "opaque", "is_opaque": True, "supports": supports, "residuals": kept, "priority": 9}
    return dataclasses.replace(reference, **changed)


def results(config, sizes, *, traced=False):
    """The loss and the gradients of a model, computed on a mesh, or their shapes."""
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    build = functools.partial(registries.models[config.name].build, config, key=jax.random.key(0))
    model = nnx.eval_shape(build) if traced else jax.jit(build)()
    graph, state = nnx.split(model)
    axes = {path: leaf.get_metadata("logical_axes") for path, leaf in nnx.to_flat_state(state)}
    params = nnx.to_pure_dict(state)
    shardings = DEFAULT_RULES.tree_shardings(mesh, params, nnx.traversals.unflatten_mapping(axes))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, SEQ), dtype=np.int32)
    positions = np.broadcast_to(np.arange(SEQ, dtype=np.int32), tokens.shape)

    def loss(params):
        with use_mesh(mesh):
            model = nnx.merge(graph, nnx.State(params))
            hidden = model(tokens, positions, jnp.ones_like(tokens)).hidden
            losses = model.head().cross_entropy(hidden, tokens, reduction="none")
            return jnp.mean(losses) + jnp.mean(model.logits(hidden) ** 2)

    if traced:
        return jax.eval_shape(jax.value_and_grad(loss), params)
    compiled = jax.jit(jax.value_and_grad(loss), in_shardings=(shardings,), out_shardings=(None, shardings))
    return jax.device_get(compiled(jax.device_put(params, shardings)))


def register_opaque():
    """Puts an opaque implementation of each op beside the references, and nothing else; returns what each was asked."""
    seen = {}
    entries = {name: registries.ops[name] for name in registries.ops.names() if name.endswith("/reference")}
    entries |= {f"{op}/opaque": opaque(op, seen) for op in PARTS}
    found = {name: Entry(name, implementation, "test") for name, implementation in entries.items()}
    registries.ops = Registry("ops", lambda: (found, {}))
    return seen


def compare(expected):
    for config, (value, gradients) in zip(CONFIGS, expected, strict=True):
        found_value, found_gradients = results(config, MESH)
        np.testing.assert_allclose(found_value, value, rtol=1e-5, err_msg=config.name)
        for left, right in zip(jax.tree.leaves(found_gradients), jax.tree.leaves(gradients), strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5, err_msg=config.name)


if __name__ == "__main__":
    if "all" in sys.argv:
        expected = [results(config, {"data": 1}) for config in CONFIGS]
        seen = register_opaque()
        compare(expected)
    else:
        seen = register_opaque()
        for config in CONFIGS:
            results(config, MESH, traced=True)
    assert seen == {op: shapes for op, (_, shapes) in PARTS.items()}, seen
