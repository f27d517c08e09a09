"""The record of an episode's tokens: a prefix tree, stored as its branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stack_core.abi.generation import GenerationUpdate

__all__ = ["Branch", "laid_out"]


@dataclass
class Branch:
    """A path of an episode's prefix tree: the tokens of one conversation. Lists have one entry per token.

    A new branch repeats the prefix shared with another branch as observed tokens. Each sampled token is trained once.

    Attributes:
      action_starts: index of the first token of each action.
      temperatures: temperature of each action; empty if all have the run's.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    action_starts: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    def observe(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the policy did not sample, or whose sampling is not trained."""
        count = len(tokens)
        self.tokens += tokens
        self.sampled += [False] * count
        self.logprobs += [0.0] * count
        self.versions += [-1] * count
        self.candidates += [()] * count
        self.rewards += [0.0] * count

    def act(self, update: GenerationUpdate, temperature: float | None = None) -> None:
        """Appends an action of the policy; `temperature` is None for the run's own."""
        assert update.logprobs is not None
        count = len(update.tokens)
        self.action_starts.append(len(self.tokens))
        if temperature is not None:
            self.temperatures.append(temperature)
        self.tokens += update.tokens
        self.sampled += [True] * count
        self.logprobs += [each.logprob for each in update.logprobs]
        self.versions += update.weights_versions
        self.candidates += update.candidates or [()] * count
        self.rewards += [0.0] * count


def laid_out(branches: Sequence[Branch]) -> Mapping[str, Any]:
    """Returns the token fields of a `Trajectory`, with the branches in sequence."""
    starts = np.cumsum([0, *(len(each.tokens) for each in branches)]).tolist()
    joined = lambda name: [value for each in branches for value in getattr(each, name)]
    candidates = joined("candidates")
    counts = np.asarray([len(each) for each in candidates], np.int32)
    flat = np.asarray([token for each in candidates for token in each], np.int32)
    pairs = zip(starts, branches, strict=False)
    return {
        "tokens": np.asarray(joined("tokens"), np.int32),
        "sampled": np.asarray(joined("sampled"), bool),
        "logprobs": np.asarray(joined("logprobs"), np.float32),
        "versions": np.asarray(joined("versions"), np.int32),
        "rewards": np.asarray(joined("rewards"), np.float32),
        "candidates": (counts, flat) if counts.any() else None,
        "action_starts": tuple(start + place for start, each in pairs for place in each.action_starts),
        "action_temperatures": tuple(joined("temperatures")),
        "branch_starts": tuple(starts[:-1]),
    }
