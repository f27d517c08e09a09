"""Training steps of denoisers on eight devices and on one; `test_meshes.py` runs this in a process that has eight."""

import functools
import math
import operator

import jax
import numpy as np

from stack_core.abi.mesh import MeshConfig, check_shardings
from stack_core.chips.device_mesh import make_mesh
from stack_train.diffusion import autoencoder_kl, autoencoder_kl_wan, dit, flux, sd3, wan
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig
from stack_train.diffusion.reconstruction import ReconstructionConfig
from stack_train.optim import AdamWConfig, ScheduleConfig
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
    "wan": (
        wan.WanConfig(
            image_size=SIDE,
            frames=2,
            channels=4,
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
    "autoencoder": (
        autoencoder_kl.AutoencoderKlConfig(
            image_size=SIDE, channels=4, widths=(8, 16), blocks_per_level=1, groups=4, **FLOATS
        ),
        autoencoder_kl.FAMILY,
        ReconstructionConfig(),
    ),
}


def batches(name):
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        frames = (MODELS[name][0].frames,) if hasattr(MODELS[name][0], "frames") else ()
        # Flux trains on batches of two buckets.
        height, width = (SIDE // 2, 2 * SIDE) if name == "flux" and step == 1 else (SIDE, SIDE)
        batch = {"images": rng.normal(size=(ROWS, *frames, height, width, 4)), "weights": np.ones(ROWS)}
        batch["weights"][-3:] = 0.0  # rows weigh differently, so that a mean of means would be wrong
        if name in ("flux", "sd3", "wan"):
            batch |= {"text": rng.normal(size=(ROWS, 4, 16))}
        if name in ("flux", "sd3"):
            batch |= {"pooled": rng.normal(size=(ROWS, 16))}
        found = {key: value.astype(np.float32) for key, value in batch.items()}
        yield {**found, "labels": rng.integers(0, 10, ROWS).astype(np.int32)} if name == "dit" else found


def losses(name, sizes):
    config, family, objective = MODELS[name]
    optimizer = AdamWConfig(learning_rate=1e-2, schedule=ScheduleConfig(warmup_steps=1))
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}), jax.devices()[: math.prod(sizes.values())])
    program = Program(make_step((family, config), objective, optimizer, steps=STEPS), mesh)
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
        blocks = {"dit": ("blocks",), "flux": ("double_blocks", "image"), "sd3": ("dual_blocks", "image")}
        blocks["wan"] = ("blocks",)
        kernel = functools.reduce(operator.getitem, (*blocks[name], "up", "kernel"), state.params)
        parts = sizes["fsdp"] * sizes.get("tensor", 1)
        assert kernel.addressable_shards[0].data.size == kernel.size // parts, name
    return np.array(found)


for each in MODELS:
    wanted = losses(each, {})
    assert np.ptp(wanted[:, 0]) > 1e-4, wanted
    for mesh in MESHES:
        np.testing.assert_allclose(losses(each, mesh), wanted, rtol=2e-5, err_msg=f"{each} on {mesh}")
