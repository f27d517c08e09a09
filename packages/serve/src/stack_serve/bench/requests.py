"""The requests of a run: drawn from its seed alone, so that two servers get the same ones."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stack_serve.bench.lengths import Lengths

__all__ = ["Requests", "Task"]

# Frequent enough that most tokenizers have one token for each.
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
    """One request: where it goes, and its body."""

    path: str
    body: dict[str, Any]
    prompt_tokens: int


@dataclass(frozen=True, kw_only=True)
class Requests:
    """What is asked of a server.

    Attributes:
      prompts, answers: lengths in tokens; answers may end earlier where the model ends them.
      vocab_size: prompts are random token ids below it; None makes them of words.
      words_per_token: of prompts of words.
      chat: ask for chat completions, whose prompts are of words.
      extra: fields of every body besides, such as `ignore_eos`.
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
        """Without end; the same for the same seed and purpose, and prompts that no other purpose has."""
        source = random.Random(f"{self.seed} {purpose}")
        while True:
            yield self.task(self.prompts.draw(source), self.answers.draw(source), source)

    def task(self, prompt_tokens: int, answer_tokens: int, source: random.Random) -> Task:
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
