"""What a step does beside the model and `sample`; what it computes is compared with models in integration_tests/."""

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.generation import SamplingParams
from stack_core.ops.sampling.sampling import SamplingSettings
from stack_serve.llm.adapters import Weights
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.step import Step

from .tiny_checkpoint import EMBED, TinyCheckpoint, random_params


def test_what_a_row_wants_that_does_not_sample_is_no_work() -> None:
    sample = jax.jit(Step(TinyCheckpoint(), EngineConfig(max_sequences=1), pages=4).sample)
    wanted = SamplingSettings.row(SamplingParams(logprobs=0), seed=(0, 0), end_tokens=(), prompt_tokens=2)
    settings = jnp.asarray(wanted.packed()[None])
    hidden = jnp.linspace(-1, 1, EMBED)[None]
    for samples in (0, 1):
        rows = jnp.array([[0, 0, 2, samples, -1, 0]], jnp.int32)
        known, sampled = sample(Weights(random_params()), jnp.zeros((1, 8), jnp.int32), settings, hidden, rows)
        assert (np.asarray(sampled.logprobs) != 0).all() == bool(samples)
        assert np.asarray(known)[0, 2] == (sampled.tokens[0, 0] if samples else 0)


def test_what_some_rows_sample_is_what_they_sample_among_all() -> None:
    step, params = Step(TinyCheckpoint(), EngineConfig(max_sequences=4), pages=4), Weights(random_params())
    sample_some = jax.jit(step.sample_some)
    wanted = [
        SamplingSettings.row(SamplingParams(logprobs=1), seed=(0, number), end_tokens=(), prompt_tokens=2).packed()
        for number in range(5)
    ]
    settings, known = jnp.asarray(np.stack(wanted)), jnp.zeros((5, 8), jnp.int32)
    hidden = jnp.linspace(-1, 1, 4 * EMBED).reshape(4, EMBED)
    rows = jnp.array([[0, 0, 2, 0, -1, 0], [1, 0, 3, 1, -1, 0], [2, 0, 4, 0, -1, 0], [3, 1, 2, 1, -1, 0]], jnp.int32)
    known_of_all, of_all = jax.jit(step.sample)(params, known, settings, hidden, rows)
    chosen, mask = jnp.array([1, 3, 4]), np.full((3, 1), -1, np.int32)
    known_of_some, of_some = sample_some(params, known, settings, hidden, rows, chosen, jnp.asarray(mask))
    np.testing.assert_array_equal(known_of_some, known_of_all)
    for some, every in zip(jax.tree.leaves(of_some), jax.tree.leaves(of_all), strict=True):
        np.testing.assert_allclose(some[:, [1, 3]], every[:, [1, 3]], rtol=1e-6)
        assert not np.any(some[:, [0, 2]])
    mask[1] = 1 << 9
    _, constrained = sample_some(params, known, settings, hidden, rows, chosen, jnp.asarray(mask))
    assert constrained.tokens[0, 3] == 9 and constrained.tokens[0, 1] == of_all.tokens[0, 1]
