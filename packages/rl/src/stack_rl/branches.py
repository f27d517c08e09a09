"""The record of an episode's tokens: a prefix tree, stored as its branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int16

from stack_core.abi.generation import GenerationUpdate, PromptImage

__all__ = ["Branch", "join_experts", "laid_out"]


@dataclass
class Branch:
    """A path of an episode's prefix tree: the tokens of one conversation. Lists have one entry per token.

    A new branch repeats the prefix shared with another branch as observed tokens. Each sampled token is trained once.

    Attributes:
      action_starts: index of the first token of each action.
      temperatures: temperature of each action; empty if all have the run's.
      experts: experts of the first tokens, each [mixtures, active], if they are replayed. A token has those of the
        first action after it, or of its own action, which sampled with them.
      images: images of the observed tokens.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    action_starts: list[int] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    images: list[PromptImage] = field(default_factory=list)

    def observe(self, tokens: Sequence[int], images: Sequence[PromptImage] = ()) -> None:
        """Appends tokens that the policy did not sample, or whose sampling is not trained.

        Args:
          tokens: the tokens.
          images: images of the tokens, whose places count from the first of them.
        """
        count = len(tokens)
        self.images += [replace(each, start=each.start + len(self.tokens)) for each in images]
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
        if update.experts is not None:
            # A later action computes earlier tokens again, but their own action was sampled with the first experts.
            self.experts += list(update.experts[len(self.experts) :])


def join_experts(updates: Sequence[GenerationUpdate]) -> Int16[np.ndarray, "inputs mixtures active"] | None:
    """Concatenates the experts of one continuation's updates; None unless they were requested."""
    parts = [each.experts for each in updates if each.experts is not None]
    return np.concatenate(parts) if parts else None


def laid_out(branches: Sequence[Branch]) -> Mapping[str, Any]:
    """Returns the token fields of a `Trajectory`, with the branches in sequence."""
    starts = np.cumsum([0, *(len(each.tokens) for each in branches)]).tolist()
    joined = lambda name: [value for each in branches for value in getattr(each, name)]
    candidates = joined("candidates")
    counts = np.asarray([len(each) for each in candidates], np.int32)
    flat = np.asarray([token for each in candidates for token in each], np.int32)
    pairs = list(zip(starts, branches, strict=False))
    return {
        "tokens": np.asarray(joined("tokens"), np.int32),
        "sampled": np.asarray(joined("sampled"), bool),
        "logprobs": np.asarray(joined("logprobs"), np.float32),
        "versions": np.asarray(joined("versions"), np.int32),
        "rewards": np.asarray(joined("rewards"), np.float32),
        "candidates": (counts, flat) if counts.any() else None,
        "experts": _laid_out_experts(branches),
        "images": tuple(replace(image, start=start + image.start) for start, each in pairs for image in each.images),
        "action_starts": tuple(start + place for start, each in pairs for place in each.action_starts),
        "action_temperatures": tuple(joined("temperatures")),
        "branch_starts": tuple(starts[:-1]),
    }


def _laid_out_experts(branches: Sequence[Branch]) -> Int16[np.ndarray, "tokens mixtures active"] | None:
    """Returns the experts of all tokens, -1 if unknown; None without any experts."""
    some = next((each.experts[0] for each in branches if each.experts), None)
    if some is None:
        return None
    unknown = np.full_like(some, -1)
    padded = ([*each.experts, *[unknown] * (len(each.tokens) - len(each.experts))] for each in branches)
    return np.asarray([experts for branch in padded for experts in branch], np.int16)
