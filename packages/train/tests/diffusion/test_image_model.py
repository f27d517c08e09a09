"""Images computed step by step, in batches that change, equal those of the sampler."""

import jax
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import GenerationError
from stack_core.text.image_models import ImageRequest, open_image_model
from stack_train.diffusion import autoencoder_kl, dit, unet
from stack_train.diffusion.image_model import DiffusionModel
from stack_train.diffusion.objectives import EpsilonConfig
from stack_train.diffusion.pipeline import Pipeline, save_pipeline
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import ImageSampler, open_images

from . import shapes

FLOATS = {"dtype": "float32", "param_dtype": "float32"}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A tiny Stable Diffusion pipeline with random weights, of 16 x 16 pixels."""
    root = tmp_path_factory.mktemp("pipeline")
    settings = {"image_size": shapes.SIZE, "blocks_per_level": 1, "groups": 4, "attends": False, **FLOATS}
    vae = autoencoder_kl.AutoencoderKlConfig(widths=(4, 8), scaling_factor=2.0, **settings)
    encoders = shapes.encoders(
        root / "none", autoencoder_kl.FAMILY.build(vae, key=jax.random.key(0)), name="StableDiffusionPipeline"
    )
    config = unet.UnetConfig(
        image_size=8, channels=4, text_tokens=6, text_dim=32, groups=4, widths=(8, 8), blocks_per_level=1,
        transformer_layers=(1, 0), heads=(2, 2), **FLOATS,
    )  # fmt: skip
    model = unet.FAMILY.build(config, key=jax.random.key(1))
    sampler = SamplerConfig(spacing="leading", steps_offset=1)
    save_pipeline(root / "tiny", Pipeline(config, model, encoders, EpsilonConfig(), sampler))
    return f"hf:{root / 'tiny'}"


@pytest.fixture(scope="module")
def model(address):
    return open_image_model(address)


def finished(model, states):
    """Advances states one batch a step, and takes out finished images."""
    states, images = list(enumerate(states)), {}
    while states:
        places, batch = zip(*states, strict=True)
        advanced = zip(places, model.advance(batch), strict=True)
        states = []
        for place, state in advanced:
            if state.step == state.steps:
                images[place] = model.pixels(state)
            else:
                states.append((place, state))
    return [images[place] for place in sorted(images)]


@pytest.mark.slow  # compiles a UNet
def test_images_of_prompts_equal_the_samplers_in_any_batch(model, address):
    requests = [
        ImageRequest(prompt="a red ring", steps=3, seed=5),
        ImageRequest(prompt="a blue bar", negative_prompt="a ring", steps=2, guidance=2.0, seed=6),
    ]
    requests = [model.resolve(each) for each in requests]
    images = finished(model, [*model.begin(requests[0], 2), *model.begin(requests[1], 1)])
    sampler = open_images(address)
    for request, count, computed in zip(requests, (2, 1), (images[:2], images[2:]), strict=True):
        settings = sampler.sampler.changed({"steps": request.steps, "guidance": request.guidance})
        negative = None if request.negative_prompt is None else [request.negative_prompt] * count
        expected = sampler.images_of([request.prompt] * count, settings, negative=negative, seed=request.seed)
        np.testing.assert_array_equal(computed, expected)
        assert expected.std() > 10


@pytest.mark.slow  # compiles a UNet
def test_estimates_approach_the_image(model):
    assert model.name == "tiny"
    (state,) = model.begin(model.resolve(ImageRequest(prompt="a red ring", steps=8, size=(16, 24))), 1)
    estimates = [model.pixels(state)]
    for _ in range(state.steps):
        (state,) = model.advance([state])
        estimates.append(model.pixels(state))
    distances = [np.abs(each.astype(int) - estimates[-1]).mean() for each in estimates]
    assert estimates[-1].shape == (16, 24, 3) and distances[-2] < distances[0] / 4


BAD = [
    ({"size": (15, 17)}, "size", "17x15; .* multiple of 2 pixels. Take 16x14 or 18x16"),
    ({"size": (1, 16)}, "size", "Take 16x2 or 18x2"),
    ({"steps": 1001}, "steps", "1001"),
    ({"guidance": -1.0}, "guidance", "guidance"),
    ({"guidance": 1.0, "negative_prompt": "a"}, "negative_prompt", "above 1"),
    ({"embedded_guidance": 3.5}, "embedded_guidance", "no guidance as an input"),
]


@pytest.mark.slow  # builds a pipeline
@pytest.mark.parametrize(("settings", "parameter", "message"), BAD)
def test_bad_settings_are_refused_with_their_parameter(model, settings, parameter, message):
    with pytest.raises(GenerationError, match=message) as error:
        model.resolve(ImageRequest(prompt="a red ring", **settings))
    assert error.value.parameter == parameter


@pytest.mark.slow
@pytest.mark.parametrize("name", ["euler_ancestral", "plms"])
def test_labels_are_prompts_of_class_conditional_models(name):
    config = dit.DitConfig(image_size=8, channels=1, classes=10, patch=2, layers=1, heads=2, head_dim=8, **FLOATS)
    model = dit.FAMILY.build(config, key=jax.random.key(0))
    # A new model ignores its inputs, because its last layers are zero.
    random = np.random.default_rng(0).standard_normal
    nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.1 * random(leaf.shape, np.float32), nnx.state(model)))
    sampler = ImageSampler(model, config, EpsilonConfig(), 1, sampler=SamplerConfig(name=name))
    served = DiffusionModel(sampler, "digits")
    requests = [served.resolve(ImageRequest(prompt=prompt, steps=6)) for prompt in "37"]
    states = [state for request in requests for state in served.begin(request, 1)]
    # Both have image number 0 of their seeds.
    expected = [sampler.images([label], SamplerConfig(name=name, steps=6))[0] for label in (3, 7)]
    np.testing.assert_array_equal(finished(served, states), expected)
    for prompt in ("a cat", "10", ""):
        with pytest.raises(GenerationError, match="number of a label, 0 to 9"):
            served.resolve(ImageRequest(prompt=prompt))
