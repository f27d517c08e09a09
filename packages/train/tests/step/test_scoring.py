"""Scores are those of the logits: log-probabilities, entropies; and values where a model has them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.mesh import MeshConfig
from stack_core.chips.device_mesh import make_mesh
from stack_train.models.llama import LlamaConfig
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig
from stack_train.step import scoring
from stack_train.step.program import Program
from stack_train.step.step import make_step

MODEL = LlamaConfig(vocab_size=13, layers=1, embed=8, heads=2, mlp=8, dtype="float32", initializer_std=0.5)


@pytest.fixture
def program():
    mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1])
    return Program(make_step(MODEL, CausalLMConfig(), AdamWConfig()), mesh)


def make_batch(seq=6):
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, seq), dtype=np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets[0, 0] = -100
    positions = np.tile(np.arange(seq, dtype=np.int32), (2, 1))
    batch = {"tokens": tokens, "targets": targets, "positions": positions, "segment_ids": np.ones_like(tokens)}
    return {name: jnp.asarray(array) for name, array in batch.items()}


def test_scores_are_those_of_the_logits(program, monkeypatch):
    monkeypatch.setattr(scoring, "_MOST_LOGITS", 2 * 2 * MODEL.vocab_size)  # two tokens of both rows at a time
    batch = make_batch()
    variables = program.step.variables(program.init(key=jax.random.key(0)))
    found = jax.jit(partial(program.on_mesh(program.step.score), entropy=True))(variables, batch)
    model = program.step.model.merge(variables)
    logits = model.logits(model(batch["tokens"], batch["positions"], batch["segment_ids"]).hidden)
    logprobs = np.asarray(jax.nn.log_softmax(logits), np.float64)
    expected = np.take_along_axis(logprobs, np.maximum(batch["targets"], 0)[..., None], axis=-1)[..., 0]
    expected[0, 0] = 0.0
    np.testing.assert_allclose(found["logprobs"], expected, atol=1e-5)
    np.testing.assert_allclose(found["entropy"], -(np.exp(logprobs) * logprobs).sum(-1), rtol=1e-5)
    assert set(program.on_mesh(program.step.score)(variables, batch)) == {"logprobs"}


def test_values_are_a_fact_of_the_models_outputs(program):
    batch = make_batch()
    model = program.step.model.merge(program.step.variables(program.init(key=jax.random.key(0))))

    class Critic:
        head, logits, states = model.head, model.logits, model.states

        def __call__(self, *inputs):
            outputs = model(*inputs)
            return replace(outputs, facts={"values": outputs.hidden[..., 0]})

    found = scoring.scores(Critic(), batch, entropy=False)
    assert set(found) == {"logprobs", "values"} and found["values"].shape == batch["tokens"].shape
