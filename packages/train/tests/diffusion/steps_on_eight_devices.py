"""Training and sampling on eight devices and on one; `test_meshes.py` runs this in a process that has eight.

Arguments select models; without arguments, all are trained.
"""

import functools
import math
import operator
import sys

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig, check_shardings
from stack_core.chips.device_mesh import make_mesh
from stack_train.diffusion import autoencoder_kl, autoencoder_kl_ltx, autoencoder_kl_wan, dit, flux, ltx, sd3, unet, wan
from stack_train.diffusion.compilation import SamplingProgram
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig
from stack_train.diffusion.reconstruction import ReconstructionConfig
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.optim import AdamWConfig, ScheduleConfig
from stack_train.step.batches import batch_shapes
from stack_train.step.program import Program
from stack_train.step.step import make_step

FLOATS = {"dtype": "float32", "param_dtype": "float32"}
ROWS, SIDE, STEPS = 16, 8, 3
MESHES = ({"data": 2, "fsdp": 2, "tensor": 2},)
MODELS = {
    "dit": (
        dit.DitConfig(image_size=SIDE, channels=4, classes=10, layers=2, heads=4, head_dim=8, **FLOATS),
        dit.FAMILY,
        FlowMatchingConfig(),
    ),
    "flux": (
        flux.FluxConfig(
            image_size=SIDE,
            channels=4,
            double_layers=2,
            single_layers=2,
            heads=4,
            head_dim=8,
            text_dim=16,
            pooled_dim=16,
            text_tokens=4,
            rope_axes=(4, 2, 2),
            **FLOATS,
        ),
        flux.FAMILY,
        EpsilonConfig(min_snr=5.0),
    ),
    "sd3": (
        sd3.Sd3Config(
            image_size=SIDE,
            channels=4,
            layers=3,
            dual_layers=1,
            heads=4,
            head_dim=8,
            qk_norm=True,
            text_dim=16,
            pooled_dim=16,
            text_tokens=4,
            max_patches=5,
            **FLOATS,
        ),
        sd3.FAMILY,
        FlowMatchingConfig(),
    ),
    "unet": (
        unet.UnetConfig(
            image_size=SIDE,
            channels=4,
            widths=(8, 16),
            blocks_per_level=1,
            transformer_layers=(0, 1),
            heads=(2, 4),
            text_dim=16,
            pooled_dim=16,
            text_tokens=4,
            size_features=4,
            groups=4,
            **FLOATS,
        ),
        unet.FAMILY,
        EpsilonConfig(),
    ),
    "wan": (
        wan.WanConfig(
            image_size=SIDE,
            frames=2,
            channels=4,
            extra_channels=6,
            image_dim=12,
            image_tokens=5,
            layers=2,
            heads=4,
            head_dim=8,
            mlp=32,
            text_dim=16,
            text_tokens=4,
            time_features=16,
            **FLOATS,
        ),
        wan.FAMILY,
        FlowMatchingConfig(),
    ),
    "ltx": (
        ltx.LtxConfig(
            image_size=4, frames=2, channels=4, layers=2, heads=4, head_dim=8, text_dim=16, text_tokens=4, **FLOATS
        ),
        ltx.FAMILY,
        FlowMatchingConfig(),
    ),
    "video_autoencoder": (
        autoencoder_kl_wan.AutoencoderKlWanConfig(
            image_size=SIDE,
            frames=3,
            channels=4,
            latent_channels=2,
            width=8,
            multipliers=(1, 2),
            blocks_per_level=1,
            halves_frames=(True,),
            latents_mean=(0.0, 0.0),
            latents_std=(1.0, 1.0),
            **FLOATS,
        ),
        autoencoder_kl_wan.FAMILY,
        ReconstructionConfig(),
    ),
    "ltx_autoencoder": (
        autoencoder_kl_ltx.AutoencoderKlLtxConfig(
            image_size=SIDE,
            frames=3,
            channels=4,
            latent_channels=2,
            patch=2,
            widths=(8, 8),
            blocks=(1, 1),
            downsamples=("spatiotemporal",),
            decoder_widths=(16,),
            decoder_blocks=(1, 1),
            upsamples=(True,),
            upsample_factors=(2,),
            upsample_residual=(True,),
            adds_noise=(True, False),
            timestep_conditioning=True,
            **FLOATS,
        ),
        autoencoder_kl_ltx.FAMILY,
        ReconstructionConfig(),
    ),
    "autoencoder": (
        autoencoder_kl.AutoencoderKlConfig(
            image_size=SIDE, channels=4, widths=(8, 16), blocks_per_level=1, groups=4, **FLOATS
        ),
        autoencoder_kl.FAMILY,
        ReconstructionConfig(),
    ),
}
# Kernels that both fsdp and tensor split.
KERNELS = {
    "dit": ("blocks", "up"),
    "flux": ("double_blocks", "image", "up"),
    "sd3": ("dual_blocks", "image", "up"),
    "unet": ("mid_block", "attentions", 0, "blocks", "enter"),
    "wan": ("blocks", "up"),
    "ltx": ("blocks", "up"),
}


def batches(name):
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        frames = (MODELS[name][0].frames,) if hasattr(MODELS[name][0], "frames") else ()
        # Flux trains on batches of two buckets.
        side = MODELS[name][0].image_size
        height, width = (side // 2, 2 * side) if name == "flux" and step == 1 else (side, side)
        batch = {"images": rng.normal(size=(ROWS, *frames, height, width, 4)), "weights": np.ones(ROWS)}
        batch["weights"][-3:] = 0.0  # rows weigh differently, so that a mean of means would be wrong
        if name in ("flux", "sd3", "unet", "wan", "ltx"):
            batch |= {"text": rng.normal(size=(ROWS, 4, 16))}
        if name in ("flux", "sd3", "unet"):
            batch |= {"pooled": rng.normal(size=(ROWS, 16))}
        if name == "wan":
            first_frame = rng.normal(size=(ROWS, *frames, height, width, 6))
            batch |= {"first_frame": first_frame, "image_features": rng.normal(size=(ROWS, 5, 12))}
        if name == "unet":
            batch |= {"sizes": np.tile([SIDE, SIDE, 0, 0, SIDE, SIDE], (ROWS, 1))}
        found = {key: value.astype(np.float32) for key, value in batch.items()}
        if name == "ltx":
            found["text_lengths"] = rng.integers(1, 5, ROWS).astype(np.int32)
        yield {**found, "labels": rng.integers(0, 10, ROWS).astype(np.int32)} if name == "dit" else found


def make_program(name, sizes):
    config, family, objective = MODELS[name]
    optimizer = AdamWConfig(learning_rate=1e-2, schedule=ScheduleConfig(warmup_steps=1))
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    return Program(make_step((family, config), objective, optimizer, steps=STEPS), mesh)


def trained(name, sizes):
    """Returns losses and gradient norms of all steps, and the variables after them."""
    program = make_program(name, sizes)
    state, compiled, found = program.init(key=jax.random.key(0)), None, []
    for batch in batches(name):
        placed = jax.device_put(batch, program.batch_shardings(batch))
        if compiled is None:
            first = program.trace(placed).lower().compile()
            compiled = program.runnable(first, placed, variants=list(batches(name)))
        state, metrics = compiled(state, placed)
        found.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    check_shardings(state, program.state_shardings)
    if "fsdp" in sizes and "autoencoder" not in name:
        kernel = functools.reduce(operator.getitem, (*KERNELS[name], "kernel"), state.params)
        parts = sizes["fsdp"] * sizes.get("tensor", 1)
        assert kernel.addressable_shards[0].data.size == kernel.size // parts, name
    return np.array(found), jax.device_get(program.step.variables(state))


def sampled(name, sizes, variables):
    """Samples from the same variables on a mesh, with guidance and, by epsilon, with noise in each step."""
    program, batch = make_program(name, sizes), next(batches(name))
    is_flow = isinstance(MODELS[name][2], FlowMatchingConfig)
    sampler = SamplerConfig(name="heun" if is_flow else "euler_ancestral", steps=3, guidance=2.0)
    sampling = SamplingProgram(program, sampler, batch_shapes(batch))
    condition = {key: batch[key] for key in sampling.condition}
    placed = jax.device_put((variables, condition), (program.variable_shardings, program.batch_shardings(condition)))
    images = sampling.jitted()(*placed, jax.random.key(1))
    parts = math.prod(sizes.get(axis, 1) for axis in ("data", "fsdp"))
    assert images.addressable_shards[0].data.shape[0] == ROWS // parts
    return np.asarray(images)


for each in sys.argv[1:] or MODELS:
    expected, variables = trained(each, {})
    assert np.ptp(expected[:, 0]) > 1e-4, expected
    images = None if "autoencoder" in each else sampled(each, {}, variables)
    for mesh in MESHES:
        found, _ = trained(each, mesh)
        np.testing.assert_allclose(found, expected, rtol=2e-5, err_msg=f"{each} on {mesh}")
        if images is not None:
            # Untrained predictions of noise leave samples with values of some hundreds.
            several, atol = sampled(each, mesh, variables), 1e-5 * np.abs(images).max()
            np.testing.assert_allclose(several, images, rtol=0, atol=atol, err_msg=f"{each} on {mesh}")
