"""Gradients of encoder-decoders on eight devices; `test_on_eight_devices.py` runs this."""

import math
import sys

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.models.t5 import T5Config
from stack_train.models.umt5 import UMT5Config
from stack_train.objectives import CausalLMConfig
from stack_train.optim import SgdConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step

SIZES = {"vocab_size": 48, "embed": 32, "layers": 2, "heads": 4, "head_dim": 8, "mlp": 64, "buckets": 8}
SIZES |= {"max_distance": 12, "max_positions": 16, "dtype": "float32"}
MODELS = (T5Config(**SIZES), UMT5Config(**SIZES, remat="full"))
MESHES = ({"fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8})
ROWS, SOURCE, TARGET = 16, 16, 12


def make_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 48, (ROWS, TARGET + 1), dtype=np.int32)
    targets = tokens[:, 1:].copy()
    targets[0, : TARGET // 2] = -100  # rows weigh differently, so that a mean of means would be wrong
    return {
        "tokens": tokens[:, :-1],
        "targets": targets,
        "positions": np.tile(np.concatenate([np.arange(5), np.arange(TARGET - 5)]).astype(np.int32), (ROWS, 1)),
        "segment_ids": np.tile(np.repeat(np.array([1, 2], np.int32), [5, TARGET - 5]), (ROWS, 1)),
        "source_tokens": rng.integers(0, 48, (ROWS, SOURCE), dtype=np.int32),
        "source_segment_ids": np.tile(np.repeat(np.array([1, 2, 0], np.int32), [6, 7, 3]), (ROWS, 1)),
    }


def compute_gradients(model, sizes):
    """Returns the loss and the gradients on a mesh."""
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    program = Program(make_step(model, CausalLMConfig(), SgdConfig()), mesh, {})
    state, batch = program.init(key=jax.random.key(0)), make_batch()
    kernel = state.params["decoder"]["blocks"]["feed_forward"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // math.prod(
        sizes.get(x, 1) for x in ("fsdp", "tensor")
    )
    placed = jax.device_put(batch, program.batch_shardings(batch))
    gradients, metrics, _ = jax.jit(program.on_mesh(program.step.gradients))(state, placed)
    return float(metrics["loss"].value), jax.device_get(gradients)


if __name__ == "__main__":
    every = "all" in sys.argv
    for model in MODELS if every else MODELS[:1]:
        loss, expected = compute_gradients(model, {"data": 1})
        for sizes in MESHES if every else MESHES[:1]:
            where = f"{model.name}, {sizes}"
            found_loss, found = compute_gradients(model, sizes)
            np.testing.assert_allclose(found_loss, loss, rtol=1e-5, err_msg=where)
            for one, several in zip(*map(jax.tree.leaves, (expected, found)), strict=True):
                np.testing.assert_allclose(several, one, rtol=0, atol=1e-5 * np.abs(one).max(), err_msg=where)
