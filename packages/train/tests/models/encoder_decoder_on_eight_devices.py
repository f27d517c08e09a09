"""Training steps of encoder-decoders on eight devices; `test_encoder_decoders.py` runs it in a process of its own."""

import math
import sys

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.models.t5 import T5Config
from stack_train.models.umt5 import UMT5Config
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step

SIZES = {"vocab_size": 48, "embed": 32, "layers": 2, "heads": 4, "head_dim": 8, "mlp": 64, "buckets": 8}
SIZES |= {"max_distance": 12, "max_positions": 16, "dtype": "float32"}
MODELS = (T5Config(**SIZES), UMT5Config(**SIZES, remat="full"))
MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8})
ROWS, SOURCE, TARGET, STEPS = 16, 16, 12, 2


def batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = rng.integers(0, 48, (ROWS, TARGET + 1), dtype=np.int32)
        targets = tokens[:, 1:].copy()
        targets[0, : TARGET // 2] = -100  # rows weigh differently, so that a mean of means would be wrong
        yield {
            "tokens": tokens[:, :-1],
            "targets": targets,
            "positions": np.tile(np.concatenate([np.arange(5), np.arange(TARGET - 5)]).astype(np.int32), (ROWS, 1)),
            "segment_ids": np.tile(np.repeat(np.array([1, 2], np.int32), [5, TARGET - 5]), (ROWS, 1)),
            "source_tokens": rng.integers(0, 48, (ROWS, SOURCE), dtype=np.int32),
            "source_segment_ids": np.tile(np.repeat(np.array([1, 2, 0], np.int32), [6, 7, 3]), (ROWS, 1)),
        }


def results(model, sizes):
    """Losses and gradient norms of all steps on a mesh."""
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    optimizer = AdamWConfig(learning_rate=1e-2)
    program = Program(make_step(model=model, objective=CausalLMConfig(), optimizer=optimizer, steps=STEPS), mesh, {})
    state, compiled, found = program.init(key=jax.random.key(0)), None, []
    kernel = state.params["decoder"]["blocks"]["feed_forward"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // math.prod(
        sizes.get(x, 1) for x in ("fsdp", "tensor")
    )
    for batch in batches():
        placed = jax.device_put(batch, program.batch_shardings(batch))
        compiled = compiled or program.trace(placed).lower().compile()
        state, metrics = compiled(state, placed)
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return np.array(found)


if __name__ == "__main__":
    every = "all" in sys.argv
    for model in MODELS if every else MODELS[:1]:
        expected = results(model, {"data": 1})
        assert expected[-1, 0] < expected[0, 0]
        for sizes in MESHES if every else MESHES[:1]:
            np.testing.assert_allclose(results(model, sizes), expected, rtol=1e-4, err_msg=f"{model.name}, {sizes}")
