"""Engines asked and answers checked, for tests that compare them with models run without any cache."""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams

__all__ = ["Continuation", "Reference", "complete", "greedy"]

_numbers = itertools.count()


@dataclass
class Continuation:
    """All that an engine told of one continuation."""

    updates: list[GenerationUpdate] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def logprobs(self) -> list[Any]:
        return [logprob for update in self.updates for logprob in update.logprobs or ()]

    @property
    def last(self) -> GenerationUpdate:
        return self.updates[-1]


def greedy(max_tokens: int, **settings: Any) -> SamplingParams:
    """The most likely tokens, so many of them."""
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **settings})


def complete(
    engine: Any, prompts: Sequence[Sequence[int]], sampling: Any, *, in_one_turn: bool = False
) -> list[list[Continuation]]:
    """Submits all prompts to an engine and collects the answers.

    Args:
      sampling: settings of all prompts, or a list with the settings of each.
      in_one_turn: whether an `LLMEngine` begins all prompts in the same turn. Otherwise early ones may have ended
        before the last one is submitted, depending on how fast this thread is.

    Returns:
      The continuations of each prompt.
    """
    settings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    requests = [
        GenerationRequest(request_id=f"request-{next(_numbers)}", prompt=tuple(map(int, prompt)), sampling=each)
        for prompt, each in zip(prompts, settings, strict=True)
    ]
    # The engine's thread takes new requests under its lock, which this thread may acquire again in `submit`.
    with engine._lock if in_one_turn else contextlib.nullcontext():
        for request in requests:
            engine.submit(request)
    found = [[Continuation() for _ in range(request.sampling.n)] for request in requests]
    for request, continuations in zip(requests, found, strict=True):
        for update in engine.stream(request.request_id):
            continuations[update.index].updates.append(update)
    return found


class Reference:
    """A checkpoint's model, run on whole sequences, without a cache."""

    def __init__(self, checkpoint: Any) -> None:
        self._params = checkpoint.load_params()
        self._positions = checkpoint.max_positions

        def logprobs(params: Any, tokens: jax.Array) -> jax.Array:
            model = checkpoint.model(params)
            return jax.nn.log_softmax(model.logits(model(tokens, jnp.arange(self._positions)[None]).hidden[0]))

        self._logprobs = jax.jit(logprobs)

    def logprobs(self, tokens: Sequence[int], params: Any = None) -> np.ndarray:
        """float32[tokens, vocab]: row i is of the token after the first i + 1."""
        padded = np.zeros((1, self._positions), np.int32)
        padded[0, : len(tokens)] = tokens
        params = self._params if params is None else params
        return np.asarray(self._logprobs(params, padded))[: len(tokens)]

    def assert_most_likely(
        self, prompt: Sequence[int], tokens: Sequence[int], *, tolerance: float = 0.0, params: Any = None
    ) -> None:
        """Each token is the most likely one after the prompt and those before it, as greedy choice makes it.

        Args:
          tolerance: how much less likely it may be, in log-probability.
        """
        logprobs = self.logprobs([*prompt, *tokens], params)[len(prompt) - 1 : -1]
        chosen = logprobs[np.arange(len(tokens)), tokens]
        np.testing.assert_array_less(logprobs.max(axis=-1) - chosen, tolerance or 1e-9)
