"""Denoisers are quantized by rules alone, as modules and as runs: stack-train and stack-quant meet in core."""

import jax
import jax.numpy as jnp
import pytest

from stack_core.abi.config import parse
from stack_quant import quantize
from stack_quant.mixed.types import Budget
from stack_quant.model import quantize_model, report
from stack_train.diffusion.flux import FAMILY, FluxConfig
from stack_train.diffusion.sampling import open_images
from stack_train.run.config import RunConfig
from stack_train.run.train import train

CONFIG = FluxConfig(
    image_size=8,
    channels=4,
    double_layers=1,
    single_layers=2,
    heads=4,
    head_dim=16,
    text_dim=32,
    pooled_dim=32,
    text_tokens=6,
    rope_axes=(4, 6, 6),
    initializer_std=0.1,
    dtype="float32",
)
INT8 = [{"path": ".*", "weights": "int8", "activations": "int8"}]
ROWS = 2


def model():
    """One whose last matrix is no zero."""
    built = FAMILY.build(CONFIG, key=jax.random.key(0))
    for place, linear in enumerate((built.last, built.last_modulation, built.single_blocks.modulation)):
        shape = linear.kernel[...].shape
        linear.kernel.set_value(0.1 * jax.random.normal(jax.random.key(place + 1), shape))
    return built


def arguments():
    keys = jax.random.split(jax.random.key(9), 3)
    images = jax.random.normal(keys[0], (ROWS, 8, 8, 4))
    condition = {"text": jax.random.normal(keys[1], (ROWS, 6, 32)), "pooled": jax.random.normal(keys[2], (ROWS, 32))}
    return images, jnp.array([100.0, 900.0]), condition


@pytest.mark.slow
def test_a_flux_is_quantized_to_int8_by_rules_alone():
    plain, call = model(), arguments()
    quantized = quantize_model(plain, INT8, call)
    said, wanted = quantized(*call), plain(*call)
    scale = float(jnp.std(wanted))
    assert 0 < float(jnp.sqrt(jnp.mean(jnp.square(said - wanted)))) < 0.1 * scale
    kernels = [row for row in report(quantized).parameters if row.path.endswith("kernel")]
    assert len(kernels) >= 30 and all(row.scheme.startswith("int8") for row in kernels), str(report(quantized))


def test_a_run_of_a_denoiser_is_quantized_and_sampled(tmp_path):
    model = {"name": "dit", "image_size": 8, "channels": 1, "classes": 10, "patch": 2, "layers": 1, "heads": 2}
    sections = {"model": model | {"head_dim": 16, "dtype": "float32"}, "data": {"name": "digits", "batch_size": 32}}
    config = {"output": str(tmp_path / "run"), **sections, "objective": {"name": "flow_matching"}}
    train(parse(RunConfig, config | {"run": {"steps": 2}}))
    options = {"calibration_batches": 1, "evaluation_batches": 1}
    result = quantize(tmp_path / "run", "w8a8", **options)
    assert result.loss_after == pytest.approx(result.loss_before, rel=0.01)
    opened = open_images(str(result.destination))
    assert opened.images([3], opened.sampler.changed({"steps": 2})).shape == (1, 8, 8, 1)
    assert quantize(tmp_path / "run", Budget("6bits"), out=tmp_path / "mixed", **options).sensitivity is not None
