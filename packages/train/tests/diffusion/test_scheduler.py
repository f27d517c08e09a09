"""Schedules of diffusers directories: read, sampled at every size, and written again."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from stack_core.abi.errors import ConversionError
from stack_train.diffusion import autoencoder_kl, flux
from stack_train.diffusion.noise import DynamicShift, NoiseConfig
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig, VConfig
from stack_train.diffusion.pipeline import Pipeline, save_pipeline
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import ImageSampler, open_images
from stack_train.diffusion.scheduler import Scheduler, read_scheduler, write_scheduler
from stack_train.huggingface import FORMAT

from . import shapes

DEV = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.30.0.dev0",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
"""`scheduler_config.json` of black-forest-labs/FLUX.1-dev."""
FLOATS = {"dtype": "float32", "param_dtype": "float32"}
TINY = flux.FluxConfig(
    image_size=8, channels=4, double_layers=1, single_layers=1, heads=2, head_dim=16, rope_axes=(4, 6, 6),
    text_dim=32, pooled_dim=32, text_tokens=6, guidance=None, **FLOATS,
)  # fmt: skip
UNUSED = dict.fromkeys(("use_karras_sigmas", "use_beta_sigmas", "invert_sigmas", "stochastic_sampling"), False)


def written(directory: Path, mapping: object) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "scheduler_config.json").write_text(json.dumps(mapping))
    return directory


@pytest.mark.parametrize(
    ("settings", "shift"),
    [
        ({}, DynamicShift()),
        ({**UNUSED, "shift_terminal": None, "time_shift_type": "linear", "max_shift": 3}, None),
        ({"use_dynamic_shifting": False}, 3.0),
        ({"use_dynamic_shifting": False, "shift": 1}, 1.0),
    ],
)
def test_a_scheduler_is_read_and_written(tmp_path, settings, shift):
    shift = shift or DynamicShift(curve="linear", max_shift=3.0)
    scheduler = read_scheduler(written(tmp_path / "given", DEV | settings))
    assert scheduler.objective.shift == shift
    write_scheduler(tmp_path / "back", scheduler)
    assert read_scheduler(tmp_path / "back") == scheduler


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_karras_sigmas": True, "use_beta_sigmas": True}, "use_karras_sigmas=True; use_beta_sigmas=True, of"),
        ({"invert_sigmas": True}, "invert_sigmas=True"),
        ({"stochastic_sampling": True}, "stochastic_sampling=True"),
        ({"use_flow_sigmas": True}, "use_flow_sigmas=True"),
        ({"num_train_timesteps": 500}, "num_train_timesteps=500, not 1000"),
        ({"time_shift_type": "cubic"}, "objective.shift.curve|shift.*curve"),
        ({"use_dynamic_shifting": False, "shift": "high"}, "shift"),
        ({"use_dynamic_shifting": False, "shift": 0}, "shift"),
        (
            {"_class_name": "DDPMScheduler"},
            "is a DDPMScheduler; FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler, DDIM",
        ),
    ],
)
def test_what_samplers_do_not_follow_is_refused_by_name(tmp_path, settings, message):
    with pytest.raises(ConversionError, match=message):
        read_scheduler(written(tmp_path, DEV | settings))


BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
BETAS |= {"set_alpha_to_one": False, "skip_prk_steps": True, "steps_offset": 1, "trained_betas": None}
STABLE = {"_class_name": "PNDMScheduler", "clip_sample": False, **BETAS}
"""`scheduler_config.json` of Stable Diffusion 1.5."""
STABLE_2 = {"_class_name": "DDIMScheduler", "clip_sample": False, "prediction_type": "v_prediction", **BETAS}
STABLE_XL = {"_class_name": "EulerDiscreteScheduler", "clip_sample": False, "interpolation_type": "linear", **BETAS}
STABLE_XL |= {"prediction_type": "epsilon", "sample_max_value": 1.0, "timestep_spacing": "leading"}
NOISE = NoiseConfig(betas="scaled_linear", beta_start=0.00085, beta_end=0.012)
LEADING = {"spacing": "leading", "steps_offset": 1}
LCM = {
    "_class_name": "LCMScheduler",
    "prediction_type": "epsilon",
    "clip_sample": False,
    "clip_sample_range": 1.0,
    **BETAS,
}
LCM |= {
    "original_inference_steps": 50,
    "timestep_scaling": 10.0,
    "timestep_spacing": "leading",
    "set_alpha_to_one": True,
}
"""`scheduler_config.json` of SimianLuo/LCM_Dreamshaper_v7, with the offset of Stable Diffusion."""
FLOW_LCM = {"_class_name": "FlowMatchLCMScheduler", "shift": 3.0, "scale_factors": None, "upscale_mode": "bicubic"}
UNIPC = {"_class_name": "UniPCMultistepScheduler"}
UNIPC_FLOW = UNIPC | {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}


@pytest.mark.parametrize(
    ("mapping", "expected"),
    [
        (STABLE, Scheduler(EpsilonConfig(noise=NOISE), SamplerConfig(name="plms", final="min", **LEADING))),
        (STABLE_2, Scheduler(VConfig(noise=NOISE), SamplerConfig(name="ddim", final="min", **LEADING))),
        (STABLE_XL, Scheduler(EpsilonConfig(noise=NOISE), SamplerConfig(**LEADING))),
        (LCM, Scheduler(EpsilonConfig(noise=NOISE), SamplerConfig(name="lcm", steps=4))),
        (
            {"_class_name": "LCMScheduler", "original_inference_steps": 3},
            Scheduler(EpsilonConfig(noise=NOISE), SamplerConfig(name="lcm", steps=3, solver_steps=3)),
        ),
        (FLOW_LCM, Scheduler(FlowMatchingConfig(shift=3.0), SamplerConfig(name="lcm", steps=4, solver_steps=1000))),
    ],
)
def test_published_schedulers_of_betas_are_read_and_written(tmp_path, mapping, expected):
    scheduler = read_scheduler(written(tmp_path / "given", mapping))
    assert scheduler == expected
    write_scheduler(tmp_path / "back", scheduler)
    assert read_scheduler(tmp_path / "back") == scheduler


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"_class_name": "DDIMScheduler"}, "clip_sample=True, not False"),  # diffusers' default
        (STABLE_2 | {"thresholding": True}, "thresholding=True, not False"),
        (STABLE_2 | {"prediction_type": "sample"}, "prediction_type='sample', not 'epsilon' or 'v_prediction'"),
        (STABLE | {"skip_prk_steps": False}, "skip_prk_steps=False, not True"),
        (STABLE | {"trained_betas": [0.1, 0.2]}, "trained_betas="),
        (STABLE | {"beta_schedule": "sigmoid"}, "beta_schedule='sigmoid', not 'linear' or"),
        (STABLE | {"timestep_spacing": "trailing"}, "plms steps by equal numbers of timesteps"),
        (STABLE_XL | {"interpolation_type": "log_linear"}, "interpolation_type='log_linear', not 'linear'"),
        (STABLE_XL | {"timestep_type": "continuous"}, "timestep_type='continuous', not 'discrete'"),
        (STABLE_XL | {"new_key": 3}, "new_key=3"),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver", "lambda_min_clipped": -5.1},
            "algorithm_type='dpmsolver', not 2 and 'dpmsolver\\+\\+'.*; lambda_min_clipped=-5.1, not -Infinity",
        ),
        ({"_class_name": "DPMSolverMultistepScheduler", "solver_order": 1}, "solver_order=1 and"),
        ({"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True}, "use_flow_sigmas=True, not False"),
        ({"_class_name": "DPMSolverMultistepScheduler", "variance_type": "learned"}, "variance_type='learned'"),
        (UNIPC | {"prediction_type": "flow_prediction"}, "prediction_type='flow_prediction', not 'epsilon'"),
        (UNIPC | {"shift_terminal": 0.1}, "shift_terminal=0.1, not None"),
        (UNIPC | {"thresholding": True, "solver_order": 3}, "thresholding=True, .*|solver_order=3, not 2"),
        (UNIPC_FLOW | {"prediction_type": "epsilon"}, "prediction_type='epsilon', not 'flow_prediction'"),
        (UNIPC_FLOW | {"solver_type": "bh1", "predict_x0": False}, "predict_x0=False, .*solver_type='bh1', not 'bh2'"),
        (UNIPC_FLOW | {"disable_corrector": [0]}, r"disable_corrector=\[0\], not \[\]"),
        (UNIPC_FLOW | {"solver_p": "other"}, "solver_p='other', not None"),
        (UNIPC_FLOW | {"use_dynamic_shifting": True}, "use_dynamic_shifting=True, not False"),
        (UNIPC_FLOW | {"use_karras_sigmas": True}, "use_karras_sigmas=True, not False"),
        (UNIPC_FLOW | {"final_sigmas_type": "sigma_min"}, "final_sigmas_type='sigma_min', not 'zero'"),
        (UNIPC_FLOW | {"num_train_timesteps": 500}, "num_train_timesteps=500, not 1000"),
        (UNIPC_FLOW | {"new_key": 3}, "new_key=3"),
        (
            LCM | {"clip_sample": True, "thresholding": True},
            "clip_sample=True, not False; thresholding=True, not False",
        ),
        (LCM | {"trained_betas": [0.1, 0.2]}, "trained_betas="),
        (LCM | {"prediction_type": "sample"}, "prediction_type='sample', not 'epsilon' or 'v_prediction'"),
        (LCM | {"new_key": 3}, "new_key=3"),
        (FLOW_LCM | {"scale_factors": [0.5, 1.0]}, r"scale_factors=\[0.5, 1.0\], not None"),
        (FLOW_LCM | {"invert_sigmas": True}, "invert_sigmas=True"),
    ],
)
def test_settings_of_betas_that_samplers_do_not_follow_are_refused_by_name(tmp_path, mapping, message):
    with pytest.raises(ConversionError, match=message):
        read_scheduler(written(tmp_path, mapping))


@pytest.mark.parametrize("content", ["[]", "{", "3"])
def test_a_file_that_is_no_scheduler_is_refused(tmp_path, content):
    (tmp_path / "scheduler_config.json").write_text(content)
    with pytest.raises(ConversionError, match="cannot be read"):
        read_scheduler(tmp_path)


@pytest.mark.parametrize(("pixels", "expected"), [(512, [0.8492, 0.6525, 0.3849]), (1024, [0.9045, 0.7595, 0.5128])])
def test_the_schedule_is_that_of_the_size_that_is_sampled(tmp_path, pixels, expected):
    model = nnx.eval_shape(lambda: flux.FAMILY.build(TINY, key=jax.random.key(0)))  # its latents have sides of 8
    config = replace(TINY, image_size=pixels // 8)
    objective = read_scheduler(written(tmp_path, DEV)).objective
    timesteps = ImageSampler(model, config, objective, None).table(SamplerConfig(steps=4)).rows[:, 0]
    np.testing.assert_allclose(timesteps / 1000.0, [1.0, *expected], atol=5e-5)


@pytest.mark.slow
def test_a_pipeline_its_run_and_its_export_follow_the_size_of_the_images(tmp_path):
    sizes = {"image_size": shapes.SIZE, "widths": (4, 8), "groups": 4, "blocks_per_level": 1, "attends": False}
    autoencoder = autoencoder_kl.AutoencoderKlConfig(**sizes, **FLOATS)
    model = flux.FAMILY.build(TINY, key=jax.random.key(0))
    encoders = shapes.encoders(tmp_path / "none", autoencoder_kl.FAMILY.build(autoencoder, key=jax.random.key(1)))
    save_pipeline(tmp_path / "dev", Pipeline(TINY, model, encoders, FlowMatchingConfig(), SamplerConfig()))
    written(tmp_path / "dev" / "scheduler", DEV)
    FORMAT.import_run(tmp_path / "dev", tmp_path / "run")
    FORMAT.export_run(tmp_path / "run", tmp_path / "back")
    # Latents have half the sides of these images, so that 128 pixels are the 1024 tokens of 512 pixels of FLUX.1.
    for address in (f"hf:{tmp_path}/dev", f"{tmp_path}/run"):
        timesteps = open_images(address, size=(128, 128)).table(SamplerConfig(steps=4)).rows[:, 0]
        np.testing.assert_allclose(timesteps / 1000.0, [1.0, 0.8492, 0.6525, 0.3849], atol=5e-5)
    assert read_scheduler(tmp_path / "back" / "scheduler").objective.shift == DynamicShift()
