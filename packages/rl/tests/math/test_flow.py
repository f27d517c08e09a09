"""Steps of a stochastic flow sampler beside their formulas in float64."""

import jax.numpy as jnp
import numpy as np

from stack_rl.math.flow import step_kl, step_logprob, step_mean


def test_steps_are_normal_distributions_of_their_coefficients():
    rng = np.random.default_rng(0)
    x, v, after, other = rng.normal(size=(4, 3, 5, 4, 2))
    coefficients = np.array([[0.9, -0.2, 0.3], [1.0, -0.05, 0.01], [0.8, -0.4, 1.5]])
    a, b, s = coefficients.T.reshape(3, 3, 1, 1, 1)
    mean, of_other = a * x + b * v, a * x + b * other
    arrays = (jnp.asarray(each, jnp.float32) for each in (x, v, after, other, coefficients))
    images, velocity, next_images, other_velocity, steps = arrays
    found = step_mean(images, velocity, steps)
    np.testing.assert_allclose(found, mean, rtol=1e-5, atol=1e-6)
    expected = (-(((after - mean) / s) ** 2) / 2 - np.log(s * np.sqrt(2 * np.pi))).mean((1, 2, 3))
    np.testing.assert_allclose(step_logprob(next_images, found, steps), expected, rtol=1e-5)
    divergence = ((mean - of_other) ** 2 / (2 * s**2)).mean((1, 2, 3))
    np.testing.assert_allclose(step_kl(found, step_mean(images, other_velocity, steps), steps), divergence, rtol=1e-4)
    assert float(step_kl(found, found, steps).max()) == 0.0
