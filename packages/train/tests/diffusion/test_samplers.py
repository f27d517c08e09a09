"""Samplers on denoisers whose answers are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.errors import ConfigError
from stack_train.diffusion.noise import DynamicShift, FlowConfig, NoiseConfig
from stack_train.diffusion.objectives import FlowMatchingConfig
from stack_train.diffusion.samplers import Inpainting, SamplerConfig, guided, levels_of, sample, table_of

NOISE = NoiseConfig(betas="scaled_linear", beta_start=0.00085, beta_end=0.012)
SCHEDULES = {"epsilon": NOISE, "v": NOISE, "flow": FlowConfig(shift=2.0)}
STD = 0.5
SHAPE = (64, 4, 4, 1)


def gaussian(prediction, schedule):
    """The exact denoiser of images that are normal with mean 0.25 and standard deviation `STD`."""

    def denoise(x, timestep):
        if prediction == "flow":
            sigma = timestep / 1000.0
            alpha = 1.0 - sigma
        else:
            alphas, sigmas = schedule.alphas_and_sigmas()
            ratio = jnp.interp(timestep, jnp.arange(1000.0), jnp.asarray(sigmas / alphas, jnp.float32))
            alpha = 1.0 / jnp.sqrt(1.0 + ratio**2)
            sigma = ratio * alpha
        variance = alpha**2 * STD**2 + sigma**2
        image = 0.25 + alpha * STD**2 / variance * (x - 0.25 * alpha)
        noise = sigma / variance * (x - 0.25 * alpha)
        return {"epsilon": noise, "v": alpha * noise - sigma * image, "flow": noise - image}[prediction]

    return denoise


def spacing_of(schedule):
    return None if isinstance(schedule, FlowConfig) else "trailing"


def exact(schedule, noise):
    """Where the flow that keeps every marginal normal leads `noise`: x0 = mean + std * (x - alpha mean) / std_t."""
    levels = levels_of(schedule, SamplerConfig(steps=1, spacing=spacing_of(schedule)))
    alpha, sigma = levels.alphas[0], levels.sigmas[0]
    return 0.25 + STD * (noise - 0.25 * alpha) / np.sqrt(alpha**2 * STD**2 + sigma**2)


def run(name, steps, prediction, **settings):
    schedule = SCHEDULES[prediction]
    config = SamplerConfig(name=name, steps=steps, spacing=spacing_of(schedule), **settings)
    keys = jax.random.split(jax.random.key(0), SHAPE[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, SHAPE[1:]))(keys)  # from the same keys, as images are sampled
    table = table_of(config, levels_of(schedule, config), prediction)
    images = jax.jit(lambda x: sample(gaussian(prediction, schedule), table, x, keys=keys))(noise)
    return np.asarray(images), exact(schedule, np.asarray(noise))


@pytest.mark.parametrize("prediction", SCHEDULES)
def test_samplers_follow_the_exact_flow_the_higher_their_order_the_closer(prediction):
    errors = {}
    for name in ("euler", "heun", "dpmpp_2m"):
        images, wanted = run(name, 40, prediction)
        errors[name] = np.abs(images - wanted).max()
    # The last step, from where little noise is left to none, is Euler's for all of them.
    assert errors["euler"] < 0.16 and errors["heun"] < 0.09 and errors["dpmpp_2m"] < 0.09, errors
    assert max(errors["heun"], errors["dpmpp_2m"]) < 0.6 * errors["euler"], errors


def test_noise_is_drawn_anew_where_eta_asks_for_it():
    plain, _ = run("ddim", 40, "epsilon")
    noisy, _ = run("ddim", 40, "epsilon", eta=1.0)
    assert np.abs(plain - noisy).max() > 0.1
    assert abs(noisy.mean() - 0.25) < 0.1 and abs(noisy.std() - STD) < 0.1
    assert np.abs(plain - run("euler", 40, "epsilon")[0]).max() < 0.01  # whose timesteps may differ by rounding


def test_the_noise_of_rows_is_not_the_initial_noise_and_is_each_images_own():
    config = SamplerConfig(name="ddim", steps=1, eta=1.0)
    table = table_of(config, levels_of(NOISE, config), "epsilon")
    table.rows[:, 3:] = [0.0, 1.0, 0.0]  # a row that leads to its own noise
    keys = jax.random.split(jax.random.key(0), 3)
    noise = jax.vmap(lambda key: jax.random.normal(key, (8, 8, 1)))(keys)
    added = sample(lambda x, timestep: x, table, noise, keys=keys)
    assert np.abs(np.corrcoef(added.reshape(3, -1), noise.reshape(3, -1)) - np.eye(6)).max() < 0.5
    np.testing.assert_array_equal(sample(lambda x, timestep: x, table, noise[1:], keys=keys[1:]), added[1:])


def test_an_image_is_made_anew_where_the_mask_is_1():
    config = SamplerConfig(steps=10, spacing="trailing", strength=0.5)
    levels = levels_of(NOISE, config)
    assert levels.timesteps.tolist() == [499.0, 399.0, 299.0, 199.0, 99.0]
    keys = jax.random.split(jax.random.key(0), SHAPE[0])
    noise = jax.vmap(lambda key: jax.random.normal(key, SHAPE[1:]))(keys)
    image = jnp.broadcast_to(jnp.array([2.0, -2.0]).repeat(2)[:, None, None], SHAPE)
    mask = jnp.broadcast_to((jnp.arange(4) < 2)[None, None, :, None].astype(jnp.float32), SHAPE)
    table, denoise = table_of(config, levels, "epsilon"), gaussian("epsilon", NOISE)
    changed = sample(denoise, table, noise, keys=keys, start=image)
    # Half of the noise leaves traces of the image.
    assert 0.5 < (changed[:, 0] - changed[:, -1]).mean() < 3.9
    inpainted = sample(denoise, table, noise, keys=keys, start=image, inpainting=Inpainting(image, mask))
    np.testing.assert_array_equal(inpainted[:, :, 2:], image[:, :, 2:])
    np.testing.assert_allclose(inpainted[:, :, :2], changed[:, :, :2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("schedule", "steps"), [(NOISE, 2), (FlowConfig(), 3)])
def test_half_of_five_steps_are_as_many_as_in_diffusers(schedule, steps):
    """`get_timesteps` of the pipelines of Stable Diffusion and of FLUX.1, from an image."""
    levels = levels_of(schedule, SamplerConfig(steps=5, strength=0.5))
    assert len(levels.timesteps) == steps


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_levels_go_from_noise_to_none(spacing):
    levels = levels_of(NOISE, SamplerConfig(steps=7, spacing=spacing))
    assert levels.timesteps.shape == levels.sigmas.shape == (7,)
    assert (np.diff(levels.sigmas) < 0).all() and levels.next_sigmas[-1] == 0.0 and levels.next_alphas[-1] == 1.0
    np.testing.assert_allclose(levels.alphas**2 + levels.sigmas**2, 1.0)
    assert levels.timesteps[0] == {"leading": 852.0, "trailing": 999.0, "linspace": 999.0}[spacing]


def test_lcm_keeps_the_guidance_of_another_sampler_only_and_takes_four_steps():
    stable = SamplerConfig(name="plms", final="min", spacing="leading", steps_offset=1, guidance=7.5)
    assert stable.changed({"name": "lcm"}) == SamplerConfig(name="lcm", steps=4, guidance=7.5)
    changed = SamplerConfig(name="lcm", steps=4, solver_steps=20).changed({"name": "euler", "spacing": "trailing"})
    assert changed == SamplerConfig(spacing="trailing")


def test_a_shift_spends_more_steps_near_noise():
    four = SamplerConfig(steps=4)
    assert levels_of(FlowConfig(shift=3.0), four).sigmas.tolist() == pytest.approx([1.0, 0.9, 0.75, 0.5])
    assert levels_of(FlowConfig(), four).sigmas.tolist() == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize(
    ("shift", "pixels", "expected"),
    [
        (DynamicShift(), 512, [1.0, 0.8492, 0.6525, 0.3849]),  # FLUX.1 dev
        (DynamicShift(), 1024, [1.0, 0.9045, 0.7595, 0.5128]),
        (DynamicShift(curve="linear"), 1024, [1.0, 0.7753, 0.5349, 0.2771]),
        (3.0, 512, [1.0, 0.9, 0.75, 0.5]),
    ],
)
def test_a_dynamic_shift_depends_on_the_size_of_the_images(shift, pixels, expected):
    tokens = (pixels // 8 // 2) ** 2
    levels = levels_of(FlowMatchingConfig(shift=shift).schedule(tokens), SamplerConfig(steps=4))
    np.testing.assert_allclose(levels.sigmas, expected, atol=5e-5)


@pytest.mark.parametrize(
    ("schedule", "settings", "message"),
    [
        (NOISE, {"name": "heun", "eta": 0.5}, "ddim alone"),
        (NOISE, {"steps": 2000}, "more than the 1000"),
        (NOISE, {"steps": 4, "strength": 0.2}, "strength=0.2 of 4 steps is no step"),
        (NOISE, {"guidance_rescale": 0.5}, "guidance is 1, which adds none"),
        (FlowConfig(), {"spacing": "trailing"}, "spacing='trailing' .* flow matching"),
        (FlowConfig(), {"name": "plms"}, "plms and a last level above 0 are for schedules of betas"),
        (NOISE, {"terminal": 0.1}, "the last time of a flow"),
        (NOISE, {"steps_offset": 1}, "shifts leading steps only"),
        (NOISE, {"steps": 1000, "spacing": "leading", "steps_offset": 1}, "leads to timestep 1000; .* ends at 999"),
        (NOISE, {"sigma_min": 0.1}, "bounds `sigmas`, which is unset"),
        (NOISE, {"name": "ddim", "sigmas": "karras"}, "ddim steps along whole timesteps"),
        (NOISE, {"name": "euler", "sigmas": "lu"}, "sigmas='lu' is for dpmpp_2m"),
        (NOISE, {"name": "heun", "final": "min"}, "heun always ends without noise"),
        (NOISE, {"name": "plms", "spacing": "trailing"}, "plms steps by equal numbers"),
        (NOISE, {"correction": "heun"}, "correction would have no effect on euler"),
        (NOISE, {"name": "unipc", "euler_at_final": True}, "euler_at_final would have no effect on unipc"),
        (NOISE, {"name": "unipc", "final": "min", "sigmas": "karras"}, "unipc ends at the last level of sigmas"),
        (FlowConfig(), {"name": "unipc", "sigmas": "karras"}, "unipc divides a flow into equal times"),
        (FlowConfig(), {"terminal": 0.1, "steps": 1}, "terminal=0.1 is the last of several times"),
        (NOISE, {"name": "lcm", "eta": 0.5}, "ddim alone"),
        (NOISE, {"name": "lcm", "spacing": "leading"}, "lcm divides the timesteps of its solver equally"),
        (NOISE, {"name": "lcm", "final": "min"}, "lcm always ends without noise"),
        (NOISE, {"name": "lcm", "sigmas": "karras"}, "lcm takes timesteps of its solver"),
        (NOISE, {"name": "lcm", "steps": 51}, "steps=51 is more than solver_steps=50"),
        (NOISE, {"name": "lcm", "solver_steps": 1001}, "solver_steps=1001 is more than the 1000 of the noise"),
        (FlowConfig(), {"name": "lcm", "steps": 51}, "steps=51 is more than solver_steps=50"),
        (FlowConfig(), {"name": "lcm", "timestep_scaling": 5.0}, "timestep_scaling=5.0 is for schedules of betas"),
        (NOISE, {"solver_steps": 20}, "solver_steps would have no effect on euler"),
    ],
)
def test_what_cannot_be_sampled_is_refused(schedule, settings, message):
    with pytest.raises(ConfigError, match=message):
        sampler = SamplerConfig(**settings)
        levels_of(schedule, sampler)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"base_tokens": 4096}, "not below"), ({"curve": "linear", "base_shift": -0.5}, "must be positive")],
)
def test_a_dynamic_shift_that_has_no_schedule_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DynamicShift(**settings)


class Two:
    """Says its label, 7 for none, in the image's left half and 0 in its right half."""

    def __call__(self, images, timesteps, condition):
        left = jnp.arange(images.shape[2]) < images.shape[2] // 2
        return jnp.where(left[:, None], condition["labels"].astype(jnp.float32)[:, None, None, None], 0.0) + images * 0

    def unconditional(self, condition):
        return {"labels": jnp.full_like(condition["labels"], 7)}


def test_guidance_goes_beyond_the_condition_and_its_rescale_takes_contrast_back():
    condition, x = {"labels": jnp.array([8, 9])}, jnp.zeros((2, 4, 4, 1))
    said = guided(Two(), condition, images=2, guidance=3.0)(x, jnp.array(5.0))
    np.testing.assert_allclose(said[:, 0, 0, 0], [10.0, 13.0])
    said = guided(Two(), condition, images=2, guidance=3.0, rescale=1.0)(x, jnp.array(5.0))
    np.testing.assert_allclose(said[:, 0, 0, 0], [8.0, 9.0], rtol=1e-6)
    said = guided(Two(), condition, images=2, guidance=1.0)(x, jnp.array(5.0))
    np.testing.assert_allclose(said[:, 0, 0, 0], [8.0, 9.0])
