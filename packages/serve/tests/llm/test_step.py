"""What a step does beside the model and `sample`; what it computes is compared with models in integration_tests/."""

import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.generation import SamplingParams
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.sampling import SamplingSettings
from stack_serve.llm.step import Step

from .tiny_checkpoint import EMBED, TinyCheckpoint, random_params


@pytest.mark.parametrize("samples", [0, 1])
def test_what_a_row_wants_that_does_not_sample_is_no_work(samples: int) -> None:
    step = Step(TinyCheckpoint(), EngineConfig(max_sequences=1), pages=4)
    wanted = SamplingSettings.row(SamplingParams(logprobs=0), seed=(0, 0), end_tokens=(), prompt_tokens=2)
    settings = jnp.asarray(wanted.packed()[None])
    hidden = jnp.linspace(-1, 1, EMBED)[None]
    rows = jnp.array([[0, 0, 2, samples, 0]], jnp.int32)
    known, sampled = step.sample(random_params(), jnp.zeros((1, 8), jnp.int32), settings, hidden, rows)
    assert (np.asarray(sampled.logprobs) != 0).all() == bool(samples)
    assert np.asarray(known)[0, 2] == (sampled.tokens[0, 0] if samples else 0)
