"""Tests of decoding in tiles; `integration_tests/parity/test_tiles.py` compares with diffusers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import ConfigError
from stack_train.diffusion import autoencoder_kl, dit
from stack_train.diffusion.objectives import FlowMatchingConfig
from stack_train.diffusion.sampling import ImageSampler
from stack_train.diffusion.tiles import decode_in_tiles

FLOATS = {"dtype": "float32", "param_dtype": "float32"}


@pytest.mark.parametrize("sides", [(21, 13), (8, 7), (16, 25)])
def test_tiles_of_a_decoder_without_neighbours_give_the_whole_image(sides):
    latents = jnp.asarray(np.random.default_rng(0).standard_normal((2, *sides, 3), np.float32))
    shapes = set()

    def decode(part):
        shapes.add(part.shape)
        return jnp.asarray(part).repeat(2, axis=1).repeat(2, axis=2)

    found = decode_in_tiles(decode, latents, tile_pixels=16, factor=2)
    np.testing.assert_allclose(found, decode(latents), atol=1e-6, rtol=0)
    assert max(shape[1:3] for shape in shapes if shape[0] == 1) == (8, min(8, sides[1]))


def test_memory_does_not_grow_with_the_image():
    config = autoencoder_kl.AutoencoderKlConfig(image_size=64, widths=(4, 8), groups=4, blocks_per_level=1, **FLOATS)
    model = autoencoder_kl.FAMILY.build(config, key=jax.random.key(0))

    def temporary_bytes(side):
        latents = jax.ShapeDtypeStruct((1, side, side, 4), jnp.float32)
        return jax.jit(model.images_of).lower(latents).compile().memory_analysis().temp_size_in_bytes

    tile, whole = temporary_bytes(16), temporary_bytes(128)
    assert whole > 8 * tile > 0  # of 64 times as many pixels; XLA without optimizations has fixed buffers, too


def test_models_that_do_not_decode_images_are_refused():
    config = dit.DitConfig()
    model = nnx.eval_shape(lambda: dit.FAMILY.build(config, key=jax.random.key(0)))
    pixels = ImageSampler(model, config, FlowMatchingConfig(), None)
    with pytest.raises(ConfigError, match="makes pixels without an autoencoder"):
        pixels.with_tiles(512)
