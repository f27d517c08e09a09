import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_rl.math.preference import accuracy, dpo_loss, dpo_margin


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_that_of_the_paper(smoothing: float) -> None:
    rng = np.random.default_rng(0)
    policy, reference = rng.normal(-20, 5, (7, 2)), rng.normal(-20, 5, (7, 2))
    ratio = 0.3 * ((policy[:, 0] - reference[:, 0]) - (policy[:, 1] - reference[:, 1]))
    expected = -(1 - smoothing) * np.log(1 / (1 + np.exp(-ratio))) - smoothing * np.log(1 / (1 + np.exp(ratio)))

    def loss(policy: jax.Array) -> jax.Array:
        margin = dpo_margin(policy, jnp.asarray(reference, jnp.float32), beta=0.3)
        return dpo_loss(margin, label_smoothing=smoothing)

    logprobs = jnp.asarray(policy, jnp.float32)
    np.testing.assert_allclose(loss(logprobs), expected, rtol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(loss(x)))(logprobs)
    sigmoid = 1 / (1 + np.exp(ratio))
    by_margin = -(1 - smoothing) * sigmoid + smoothing * (1 - sigmoid)
    np.testing.assert_allclose(gradient, 0.3 * np.stack([by_margin, -by_margin], -1), rtol=1e-4, atol=1e-7)


def test_large_margins_neither_overflow_nor_lose_their_gradient() -> None:
    margin = jnp.array([-1e4, 1e4])
    np.testing.assert_allclose(dpo_loss(margin), [1e4, 0.0])
    np.testing.assert_allclose(jax.grad(lambda m: jnp.sum(dpo_loss(m)))(margin), [-1.0, 0.0], atol=1e-6)
    np.testing.assert_array_equal(accuracy(margin), [0, 1])
