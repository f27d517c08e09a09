"""Moments in 16 or 8 bits: what is stored, that rounding keeps the mean, and that training goes on as with float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from stack_core.abi.errors import ConfigError
from stack_train.optim import AdafactorConfig, AdamWConfig, LionConfig, MuonConfig, ScheduleFreeConfig, SgdConfig
from stack_train.optim.moments import compress_moments

AXES = {"w": ("embed", "mlp"), "stacked": ("layers", "embed"), "b": ("mlp",)}
PARAMS = {"w": jnp.zeros((64, 256)), "stacked": jnp.zeros((2, 64)), "b": jnp.zeros(256)}


@jax.jit
def gradients(number):
    """Gradients whose columns differ by a factor of 1000."""
    key = jax.random.fold_in(jax.random.key(7), number)
    sizes = jnp.logspace(-3, 0, 256)
    return {name: jax.random.normal(key, x.shape) * sizes[: x.shape[-1]] for name, x in PARAMS.items()}


def moments_after(transformation, updates=120):
    state, update = transformation.init(PARAMS), jax.jit(transformation.update)
    with jax.numpy_dtype_promotion("standard"):
        for number in range(updates):
            moments, state = update(gradients(number), state, PARAMS)
    return jax.tree.map(np.asarray, moments)


@pytest.mark.parametrize(
    ("config", "moments", "stored"),
    [
        (AdamWConfig, "bfloat16", ["bfloat16", "bfloat16"]),
        (AdamWConfig, "8bit", ["float8_e4m3fn", "uint8"]),
        (LionConfig, "bfloat16", ["bfloat16"]),
        (MuonConfig, "8bit", ["float8_e4m3fn"]),
        (SgdConfig, "8bit", ["float8_e4m3fn"]),
        (ScheduleFreeConfig, "8bit", ["uint8"]),
    ],
)
def test_the_moments_of_matrices_alone_are_stored_in_fewer_bits(config, moments, stored):
    state = jax.eval_shape(config(moments=moments, clip_norm=None).build(10, AXES).init, PARAMS)
    leaves = [(jax.tree_util.keystr(path), str(leaf.dtype)) for path, leaf in jax.tree.leaves_with_path(state)]
    small = [(path, dtype) for path, dtype in leaves if dtype not in ("float32", "int32")]
    assert [dtype for _, dtype in small] == stored
    assert all(path.startswith(".inner") and path.endswith("['w']") for path, _ in small)
    assert sum(path.startswith(".scales") for path, _ in leaves) == (len(stored) if moments == "8bit" else 0)


@pytest.mark.parametrize(("moments", "spread"), [("bfloat16", 0.02), ("8bit", 0.35)])
def test_rounding_keeps_the_mean_of_moments(moments, spread):
    adam = optax.scale_by_adam(0.9, 0.95)
    # Returns the moments before an update instead of its result.
    shown = optax.GradientTransformation(adam.init, lambda g, s, p: ((s.mu["w"], s.nu["w"]), adam.update(g, s, p)[1]))
    for found, wanted in zip(moments_after(compress_moments(shown, moments, AXES)), moments_after(shown), strict=True):
        error = (found - wanted) / np.sqrt(np.mean(wanted**2, axis=0))  # relative to the size of a column
        assert np.abs(error.mean()) < 0.01
        assert np.sqrt(np.mean(error**2)) < spread


def test_an_optimizer_without_such_moments_refuses_them():
    for config in (AdafactorConfig(moments="8bit"), SgdConfig(momentum=0.0, moments="bfloat16")):
        with pytest.raises(ConfigError, match="keeps no moments of matrices"):
            config.build(10, AXES).init(PARAMS)
