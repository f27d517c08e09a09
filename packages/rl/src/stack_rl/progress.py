"""A warning about a run whose rewards contain nothing to learn."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from stack_rl.contracts import Tasks, Trajectory
from stack_rl.experience import overlong_rewards
from stack_rl.math.advantages import equal_groups
from stack_rl.objectives.policy import PolicyConfig

__all__ = ["RewardMonitor"]

_STEPS: Final = 3
"""Number of steps without a difference between rewards before the warning."""
_FEWEST_BATCHES: Final = 2
_MOST_CHARACTERS: Final = 400
_OF_GROUPS: Final = ("group", "centred", "leave_one_out", "whitened")
_HALF: Final = 0.5


class RewardMonitor:
    """Warns if the first batches of a process contain nothing to learn.

    This is the case if all rewards that the advantages compare are equal: within every group, or for an algorithm
    without a group baseline, within the batch. Their gradient is then 0, whatever the loss of KL and entropy terms is.
    Later batches are not checked, because rewards are also equal once the policy solves all tasks.

    Args:
      tasks: tasks of the environment, which name and decode an answer.
      algorithm: the algorithm, which determines the rewards to compare.
    """

    def __init__(self, tasks: Tasks, algorithm: PolicyConfig) -> None:
        self._tasks, self._algorithm = tasks, algorithm
        self._limit = max(-(-_STEPS // algorithm.updates), _FEWEST_BATCHES)
        self._flat = 0
        self._is_done = not algorithm.reads_rewards

    def check(self, trajectories: Sequence[Trajectory | None]) -> None:
        """Checks the next batch, and warns if it is the last of several without a difference between rewards."""
        if self._is_done:
            return
        found = [each for each in trajectories if each is not None]
        if not self._is_flat(found):
            self._is_done = True
            return
        self._flat += 1
        if self._flat == self._limit:
            self._is_done = True
            warnings.warn(self._message(found), stacklevel=2)

    def _is_flat(self, found: Sequence[Trajectory]) -> bool:
        rewards = np.asarray([float(each.rewards.sum()) for each in found]) + overlong_rewards(self._algorithm, found)
        if self._algorithm.advantage in _OF_GROUPS:
            return bool(equal_groups(rewards, np.asarray([each.group for each in found])).all())
        return len(np.unique(rewards)) == 1

    def _message(self, found: Sequence[Trajectory]) -> str:
        scope = "each of their groups" if self._algorithm.advantage in _OF_GROUPS else "each of them"
        shares = {
            "unparsed": float(np.mean([each.verdict == "unparsed" for each in found])),
            "cut by a token limit": float(np.mean([each.is_unfinished for each in found])),
            "correct": float(np.mean([each.verdict == "correct" for each in found])),
        }
        rewards = [float(each.rewards.sum()) for each in found]
        # The answer shows the problem that most answers have.
        kind = "unparsed" if shares["unparsed"] >= _HALF else found[0].verdict
        shown = next((each for each in found if each.verdict == kind), found[0])
        parts = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
        lines = [
            f"The policy learned nothing from the first {self._limit} batches: in {scope}, all rewards were equal, so "
            "their gradient is 0.",
            f"Of {len(found)} answers: {parts}; rewards {min(rewards):.4g} to {max(rewards):.4g}.",
            f"An answer to {self._tasks.name(shown.task)}:",
            *(f"  {line}" for line in self._describe(shown)),
            "Change:",
            *(f"  - {line}" for line in _remedies(shares, rewards, found)),
        ]
        return "\n".join(lines)

    def _describe(self, each: Trajectory) -> Iterator[str]:
        first = int(np.argmax(each.sampled))
        text = lambda tokens: self._tasks.text(tuple(map(int, tokens)))
        yield f"prompt: {_shortened(text(each.tokens[:first]), from_end=True)!r}"
        cut = " (cut by its token limit)" if each.is_unfinished else ""
        yield f"answer: {_shortened(text(each.tokens[first:]))!r}{cut}"
        verdict, parsed = each.verdict or "none", repr(_shortened(each.parsed or ""))
        if each.parsed is None:
            parsed = "no answer" if each.verdict == "unparsed" else "not reported"
        yield f"read by the reward: {parsed}; verdict {verdict}, reward {each.rewards.sum():.4g}"


def _remedies(shares: Mapping[str, float], rewards: Sequence[float], found: Sequence[Trajectory]) -> Iterator[str]:
    if shares["cut by a token limit"] >= _HALF:
        yield (
            "the token limit: raise data.environment.max_tokens and data.seq_tokens, ask for a short answer in the "
            "prompt, or start from a model that ends its answers (run.init_from)"
        )
    if shares["unparsed"] >= _HALF:
        yield (
            "the prompt: state the format that the reward reads, with an example, and apply the model's chat template "
            "by giving the prompt as messages; or train on demonstrations first"
        )
        yield "the reward (data.environment.rewards): choose one that reads the policy's format"
        return
    if shares["correct"] == 1:
        yield "the tasks: the policy already solves them, so use harder ones"
        return
    if len({(each.group, each.tokens.tobytes()) for each in found}) == len({each.group for each in found}):
        yield "data.temperature: all answers to a task are the same, so raise it"
    yield "the tasks: use easier ones, or start from a model that sometimes solves them (run.init_from)"
    if len(set(rewards)) == 1:
        yield "the reward (data.environment.rewards): give partial credit, so that answers differ"
    yield "data.group_size: with more attempts at a task, some may differ"


def _shortened(text: str, *, from_end: bool = False) -> str:
    if len(text) <= _MOST_CHARACTERS:
        return text
    return f"...{text[-_MOST_CHARACTERS:]}" if from_end else f"{text[:_MOST_CHARACTERS]}..."
