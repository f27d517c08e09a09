"""Adapters and quantized training on a checkpoint in bfloat16: float32 parameters, as if from float32 values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program

MODEL = {"name": "llama", "vocab_size": 29, "layers": 1, "embed": 16, "heads": 2, "mlp": 32, "max_positions": 16}
PATHS = ".*(attention|feed_forward).*"
LORA = {"lora": {"rules": {"path": PATHS, "rank": 2, "alpha": 4}}}
NF4 = {"quant": {"rules": [{"path": PATHS, "weights": "nf4", "tile_size": 16}]}, **LORA}
INT8 = {"path": "feed_forward", "weights": "int8", "activations": "int8", "gradients": "int8"}
SECTIONS = {
    "lora": LORA,
    "qt": {"quant": {"method": "qt", "rules": [INT8]}},
    "qat": {"quant": {"method": "qat", "rules": "w8a8"}},
    "lora_on_nf4": NF4,
}


def trainer_of(sections, dtype):
    optimizer = {"learning_rate": 1e-6, "beta2": 0.999, "schedule": {"decay": "constant"}}
    data = {"source": "text:unread", "seq_tokens": 8, "batch_size": 4}
    base = {"output": "unwritten", "model": {**MODEL, "param_dtype": dtype}, "data": data, "optimizer": optimizer}
    return build_program(parse(RunConfig, {**base, **sections}))


def floats(tree):
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)}


def vector(tree):
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def trained(program, values):
    """The losses of three steps, and the state and parameters around them."""
    tokens = np.random.default_rng(0).integers(0, 29, (4, 9), dtype=np.int32)
    positions, segments = np.tile(np.arange(8, dtype=np.int32), (4, 1)), np.ones((4, 8), np.int32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "positions": positions, "segment_ids": segments}
    state, losses = program.init(jax.tree.map(jnp.copy, values), key=jax.random.key(0)), []
    start, step = vector(state.params), jax.jit(program.on_mesh(program.step))
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state, start


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_what_a_transform_trains_on_a_bfloat16_checkpoint_is_float32(name):
    published, wide = (trainer_of(SECTIONS[name], dtype) for dtype in ("bfloat16", "float32"))
    values = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape).astype(jnp.bfloat16) / 4,
        published.initial_variables,
    )
    losses, state, start = trained(published, values)
    expected_losses, expected, _ = trained(wide, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), values))
    assert losses == expected_losses and (vector(state.params) == vector(expected.params)).all()
    assert floats((state.params, state.opt_state)) == {"float32"}
    assert np.mean(vector(state.params) != start) > 0.94
    if name == "lora":
        assert floats(state.frozen) == {"bfloat16"}


@pytest.mark.parametrize("name", SECTIONS)
def test_trained_parameters_and_moments_are_float32_whatever_the_checkpoint_has(name):
    state = trainer_of(SECTIONS[name], "bfloat16").abstract_state
    assert floats((state.params, state.opt_state)) == {"float32"}
    if name == "lora":
        assert floats(state.frozen) == {"bfloat16"}


def test_adapters_in_bfloat16_are_on_request_and_have_float32_moments():
    asked = {"lora": {**LORA["lora"], "dtype": "bfloat16"}}
    state = trainer_of(asked, "bfloat16").abstract_state
    assert (floats(state.params), floats(state.opt_state)) == ({"bfloat16"}, {"float32"})
    with pytest.raises(ConfigError, match=r"precision\.params is 'bfloat16', but no parameter of the model itself"):
        _ = trainer_of({**LORA, "precision": {"params": "bfloat16"}}, "bfloat16").abstract_state
