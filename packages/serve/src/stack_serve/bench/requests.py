"""Requests of a benchmark run, generated from its seed to be the same for every server."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stack_serve.bench.lengths import Lengths

__all__ = ["Requests", "Task"]

# Frequent English words, which most tokenizers encode as one token.
_TEXT = (
    "the of and to in is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no out up into than them only "
    "time other new some could these two may first then do any like my now over such our man me even most made after "
    "also did many off before must well back through years where much your way down should because long each just "
    "state people those too mr how little good world make very year still see work life get here between both day "
    "under never know same another while last us might great old go come since against right came take used himself "
    "few house use place during high without again home around small however found part school every left"
)
_WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Task:
    """One request.

    Attributes:
      path: path of the request, relative to the address of the endpoint.
      body: JSON body.
      prompt_tokens: requested prompt length in tokens, exact only for prompts of token ids.
    """

    path: str
    body: dict[str, Any]
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Generator of the requests of a run.

    Attributes:
      model: name of the model on the server.
      prompts: distribution of prompt lengths in tokens.
      answers: distribution of maximum answer lengths in tokens; the model may end an answer earlier.
      seed: seed of the prompts and lengths.
      vocab_size: upper bound of the random token ids in prompts; None generates prompts of words.
      words_per_token: number of words generated per requested prompt token.
      chat: whether to request chat completions instead of completions; requires prompts of words.
      extra: additional fields of every body, such as `ignore_eos`.
    """

    model: str
    prompts: Lengths
    answers: Lengths
    seed: int = 0
    vocab_size: int | None = None
    words_per_token: float = 1.0
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def tasks(self, purpose: str) -> Iterator[Task]:
        """Yields an endless sequence of tasks that depends only on the seed and the purpose, such as a load's name."""
        source = random.Random(f"{self.seed} {purpose}")
        while True:
            yield self.task(self.prompts.draw(source), self.answers.draw(source), source)

    def task(self, prompt_tokens: int, answer_tokens: int, source: random.Random) -> Task:
        """Builds a request with a greedy, streamed answer of at most `answer_tokens` tokens."""
        body = {
            "model": self.model,
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        prompt = self._prompt(prompt_tokens, source)
        if self.chat:
            return Task("/chat/completions", {**body, "messages": [{"role": "user", "content": prompt}]}, prompt_tokens)
        return Task("/completions", {**body, "prompt": prompt}, prompt_tokens)

    def _prompt(self, tokens: int, source: random.Random) -> str | list[int]:
        if self.vocab_size is not None:
            return [source.randrange(self.vocab_size) for _ in range(tokens)]
        return " ".join(source.choices(_WORDS, k=max(1, round(tokens * self.words_per_token))))
