"""Losses and gradients of image-text models on eight devices; `test_on_eight_devices.py` runs this.

The compiled loss must not hold the features of all pairs on a device, nor the logits of all of them.
"""

import math
import re
import sys

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.contrastive.clip import ClipModelConfig
from stack_train.contrastive.objectives import SigmoidContrastiveConfig, SoftmaxContrastiveConfig
from stack_train.contrastive.siglip import SiglipModelConfig, SiglipTextConfig
from stack_train.diffusion.clip import ClipTextSize
from stack_train.optim import SgdConfig
from stack_train.step.program import Program
from stack_train.step.step import make_step
from stack_train.vision.clip import ClipVisionConfig
from stack_train.vision.siglip import SiglipConfig

ROWS, SIDE, TOKENS, WIDTH = 56, 12, 6, 32
TOWER = {"embed": WIDTH, "mlp": 40, "layers": 2, "heads": 4}
IMAGES, TEXTS = {**TOWER, "image_size": SIDE, "patch": 4}, {**TOWER, "vocab_size": 16, "max_positions": TOKENS}
OWN = {"dtype": "float32", "initializer_std": 0.2}
MODELS = (
    (
        SiglipModelConfig(vision=SiglipConfig(**IMAGES), text=SiglipTextConfig(**TEXTS), **OWN),
        SigmoidContrastiveConfig(),
    ),
    (
        ClipModelConfig(vision=ClipVisionConfig(**IMAGES), text=ClipTextSize(**TEXTS, end=2), features=WIDTH, **OWN),
        SoftmaxContrastiveConfig(),
    ),
)
MESHES = ({"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 8}, {"data": 8})


def make_batch():
    rng = np.random.default_rng(0)
    weights = np.ones(ROWS, np.float32)
    weights[-9:] = 0.0  # rows weigh differently, so that a mean of means would be wrong
    return {
        "pixels": rng.integers(0, 256, (ROWS, SIDE, SIDE, 3)).astype(np.uint8),
        # Few captions, so that some are found by a model that was not trained.
        "tokens": rng.integers(0, 16, (7, TOKENS)).astype(np.int32)[rng.integers(0, 7, ROWS)],
        "weights": weights,
        "present": np.where(np.arange(ROWS) < ROWS - 3, 1.0, 0.0).astype(np.float32),
    }


def compute_gradients(config, objective, sizes):
    """Returns the metrics, the gradients, and the text of the compiled program on a mesh."""
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    program = Program(make_step(config, objective, SgdConfig()), mesh, {})
    state, batch = program.init(key=jax.random.key(0)), make_batch()
    placed = jax.device_put(batch, program.batch_shardings(batch))
    compiled = jax.jit(program.on_mesh(program.step.gradients)).lower(state, placed).compile()
    gradients, metrics, _ = compiled(state, placed)
    return {name: float(metric) for name, metric in metrics.items()}, jax.device_get(gradients), compiled.as_text()


def check_program(text, objective, devices):
    """Checks the shapes of the arrays that a device holds."""
    shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}
    own = ROWS // devices
    assert (ROWS, ROWS) not in shapes, f"{objective.name}: the logits of all pairs"
    if objective.name == "sigmoid_contrastive":
        assert (own, own) in shapes and "collective-permute" in text
        # The towers have arrays of rows per device, so features of all rows would come from a gather.
        assert (ROWS, WIDTH) not in shapes, "the features of all texts"
    else:
        assert (own, ROWS) in shapes or (ROWS, own) in shapes


if __name__ == "__main__":
    every = "all" in sys.argv
    for model, loss in MODELS:
        expected, gradients, _ = compute_gradients(model, loss, {"data": 1})
        assert all(0 < expected[name] < 0.5 for name in ("image_recall", "text_recall")), expected
        for sizes in MESHES if every else MESHES[:1]:
            where = f"{loss.name}, {sizes}"
            found, several, text = compute_gradients(model, loss, sizes)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=f"{name}: {where}")
            for one, other in zip(*map(jax.tree.leaves, (gradients, several)), strict=True):
                # The gradients of biases of keys are 0 but for rounding.
                np.testing.assert_allclose(other, one, rtol=0, atol=1e-7 + 1e-5 * np.abs(one).max(), err_msg=where)
            check_program(text, loss, math.prod(sizes.values()) // sizes.get("tensor", 1))
