"""The run in a directory, quantized, on a mesh; `test_quantize.py` runs this in its own process."""

import os
import sys
from pathlib import Path

os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from stack_core.abi.mesh import DEFAULT_RULES, MeshConfig, use_mesh
from stack_core.chips.device_mesh import make_mesh
from stack_core.ops.building import is_quantized
from stack_train.run.config import run_config
from stack_train.variables.trained_model import RUN_FORMAT
from stack_train.variables.weights import read_model, read_params

TOKENS = jnp.arange(48).reshape(4, 12) * 5
POSITIONS = jnp.tile(jnp.arange(12), (4, 1))


def logits(model):
    graph, state = nnx.split(model)

    def logits(state):
        merged = nnx.merge(graph, state)
        return merged.logits(merged(TOKENS, POSITIONS).hidden)

    return np.asarray(jax.jit(logits)(state))


def main() -> None:
    run = Path(sys.argv[1])
    config = run_config(run)
    alone = read_model(run, config)[0]
    expected = logits(alone)
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    with use_mesh(mesh):
        model = read_model(run, config)[0]
        np.testing.assert_allclose(logits(model), expected, atol=1e-4)
    held = {path: variable.get_value() for path, variable in nnx.to_flat_state(nnx.state(model))}
    axes = {path: variable.get_metadata("logical_axes") for path, variable in nnx.to_flat_state(nnx.state(model))}
    shardings = {path: DEFAULT_RULES.sharding(mesh, axes[path], value.shape) for path, value in held.items()}
    quantized = {path: value for path, value in held.items() if is_quantized(value)}
    assert len(quantized) == 9, held.keys()
    for path, value in quantized.items():
        codes = value.planes[0]
        assert codes.sharding.is_equivalent_to(shardings[path], codes.ndim), (path, codes.sharding)
        assert codes.addressable_shards[0].data.size == codes.size // 8, path
    flat = {path: sharding for path, sharding in shardings.items() if path[0] != "static_ranges"}
    params = read_params(run, config.model, nnx.traversals.unflatten_mapping(flat))[0]
    whole = nnx.traversals.flatten_mapping(read_params(run, config.model)[0])
    for path, array in nnx.traversals.flatten_mapping(params).items():
        assert array.sharding.is_equivalent_to(shardings[path], array.ndim), path
        np.testing.assert_array_equal(array, whole[path])
    check_generation(run, mesh)


def check_generation(run: Path, mesh: Mesh) -> None:
    """Codes and scales come to their devices from the host."""
    checkpoint = RUN_FORMAT.open_for_generation(run)
    shardings = checkpoint.shardings(mesh)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        params = checkpoint.load_params(shardings)
    for array, sharding in zip(jax.tree.leaves(params), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == sharding


if __name__ == "__main__":
    main()
