"""The SDE of a flow: its steps beside the paper's formulas, and the distribution of its images beside the flow's."""

import numpy as np
import pytest

from stack_train.diffusion.flow_sde import sample_steps, step_coefficients
from stack_train.diffusion.levels import flow_levels
from stack_train.diffusion.noise import FlowConfig
from stack_train.diffusion.samplers import SamplerConfig


def levels(steps, shift=1.0):
    return flow_levels(FlowConfig(shift=shift), SamplerConfig(steps=steps))


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_step_has_the_mean_and_the_deviation_of_the_paper(shift):
    steps, rng = levels(7, shift), np.random.default_rng(0)
    coefficients = step_coefficients(steps, noise_level=0.7)
    x, v = rng.normal(size=(2, 3))
    for row, (a, b, s) in enumerate(coefficients[:-1]):
        t, t_next = steps.sigmas[row], steps.next_sigmas[row]
        # Equation 9 of Flow-GRPO; at t = 1, sigma_t is infinite, and the next time takes its place there.
        sigma = 0.7 * np.sqrt(t / (1.0 - (t if t < 1.0 else t_next)))
        mean = x + (v + sigma**2 / (2 * t) * (x + (1 - t) * v)) * (t_next - t)
        np.testing.assert_allclose(a * x + b * v, mean, rtol=1e-12)
        assert s == pytest.approx(sigma * np.sqrt(t - t_next), rel=1e-12) and s > 0.0
    np.testing.assert_allclose(coefficients[-1], [1.0, -steps.sigmas[-1], 0.0])


@pytest.mark.parametrize("steps", [1, 5])
def test_without_noise_the_steps_are_those_of_the_flow(steps):
    expected = np.stack([np.ones(steps), np.diff([*levels(steps).sigmas, 0.0]), np.zeros(steps)], axis=1)
    np.testing.assert_allclose(step_coefficients(levels(steps), noise_level=0.0), expected, atol=1e-15)


def test_images_of_a_normal_distribution_keep_the_distribution_of_the_flow_at_each_time():
    """For x0 of N(m, c^2), v is linear in x, so the moments of all steps follow without sampling, in float64."""
    m, c = 0.6, 0.4

    def errors(count):
        steps, mean, variance, worst = levels(count), 0.0, 1.0, 0.0
        for row, (a, b, s) in enumerate(step_coefficients(steps, noise_level=0.7)):
            t, t_next = steps.sigmas[row], steps.next_sigmas[row]
            # E[e - x0 | x] of x = (1 - t) x0 + t e.
            slope = (t - (1 - t) * c**2) / ((1 - t) ** 2 * c**2 + t**2)
            offset = -m - slope * (1 - t) * m
            mean, variance = (a + b * slope) * mean + b * offset, (a + b * slope) ** 2 * variance + s**2
            exact = (1 - t_next) * m, (1 - t_next) ** 2 * c**2 + t_next**2
            if t_next <= 0.5:
                worst = max(worst, abs(mean - exact[0]), abs(variance - exact[1]))
        return worst, abs(variance - c**2)

    # The rate of the noise is infinite at t = 1, so the first steps always err. With noise_level 0.7 their error fades
    # by (1 / steps)^0.49.
    (few, _), (many, last) = errors(1000), errors(4000)
    assert many < 2e-3 and many < 0.55 * few and last < 5e-4


def test_sampled_steps_follow_from_each_other():
    steps = levels(4)
    coefficients = step_coefficients(steps, noise_level=0.7)
    noise = np.random.default_rng(1).standard_normal((20_000, 2), np.float32)
    rng = np.random.default_rng(2)
    found = list(sample_steps(lambda x, t: np.float32(t / 1000) * x, steps, coefficients, noise, rng=rng))
    np.testing.assert_array_equal(found[0][0], noise)
    for row, (x, v, after) in enumerate(found):
        np.testing.assert_array_equal(v, np.float32(steps.timesteps[row] / 1000) * x)
        a, b, s = coefficients[row]
        new = after - (a * x + b * v)
        assert new.std() == pytest.approx(s, rel=0.02, abs=1e-6) and abs(new.mean()) < 0.02 * s + 1e-6
        assert abs(np.corrcoef(new.ravel(), x.ravel())[0, 1]) < 0.02 or not s
        if row:
            np.testing.assert_array_equal(x, found[row - 1][2])
