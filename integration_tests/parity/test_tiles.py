"""Decoding in tiles against diffusers' `enable_tiling`, in float32, on a tiny random autoencoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from stack_train.diffusion.components import load_component
from stack_train.diffusion.tiles import decode_in_tiles

from .test_diffusers import TOLERANCE, drawn, of_numpy, of_torch, of_vae

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("attends", [True, False])
def test_tiles_are_decoded_and_blended_as_in_diffusers(attends, tmp_path):
    component, theirs = of_vae(attends=attends)
    drawn(theirs).save_pretrained(tmp_path / "vae")
    _, ours = load_component(component, tmp_path / "vae")
    # Tiles of `sample_size`, 16 pixels or 4 latents. The last row has 2 latents, and the second last 4 of 5.
    latents = np.random.default_rng(0).standard_normal((2, 8, 13, 4), np.float32)
    theirs.enable_tiling()
    with torch.no_grad():
        wanted = of_numpy(theirs.decode(of_torch(latents)).sample)
        theirs.disable_tiling()
        whole = of_numpy(theirs.decode(of_torch(latents)).sample)
    with jax.default_matmul_precision("highest"):
        found = decode_in_tiles(jax.jit(ours.decode), jnp.asarray(latents), tile_pixels=16, factor=4)
    scale = max(1.0, np.abs(wanted).max())
    assert np.abs(wanted - whole).max() > 100 * TOLERANCE * scale
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE * scale, rtol=0)
