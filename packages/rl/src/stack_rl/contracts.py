"""Environments: what a policy acts in, token by token, the rewards that it gets there, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsFloat, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    import numpy as np

    from stack_core.abi.formats import GenerativeCheckpoint
    from stack_core.abi.generation import FinishReason

__all__ = [
    "Action",
    "Completion",
    "Environment",
    "EnvironmentKind",
    "Observation",
    "Outcome",
    "Reward",
    "Score",
    "Tasks",
    "Trajectory",
    "Verdict",
]

Verdict: TypeAlias = Literal["correct", "wrong", "timeout", "crash", "unparsed"]
"""What became of an answer that was checked; a check that did not end is no wrong answer."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What an environment shows the policy, which acts next.

    Attributes:
      tokens: appended to what the policy has seen; of the first observation, the prompt.
      max_tokens: of the action that follows.
      stop_tokens: end that action, besides the model's own end tokens.
    """

    tokens: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Action:
    """What the policy wrote: its tokens, the one that ended it included, and why they end."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What an action led to.

    Attributes:
      reward: of this action, a number of any library; those of an episode are summed as Python's.
      observation: None ends the episode.
      verdict: of the answer, where one was checked.
      facts: measurements for people, such as the parts of a reward.
    """

    reward: SupportsFloat = 0.0
    observation: Observation | None = None
    verdict: Verdict | None = None
    facts: Mapping[str, SupportsFloat] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One episode. What it raises is a failure of the environment, which is never taken for a reward."""

    async def reset(self) -> Observation:
        """Begins the episode."""
        ...

    async def step(self, action: Action) -> Outcome: ...

    async def close(self) -> None:
        """Frees what the episode holds; called once, however it ended."""
        ...


@runtime_checkable
class Tasks(Protocol):
    """The tasks of an environment, numbered from 0; an episode is one attempt at a task.

    Attributes:
      training: how many there are to train on; None: every number is one.
      held_out: how many others there are, which a run is evaluated on.
    """

    @property
    def training(self) -> int | None: ...

    @property
    def held_out(self) -> int: ...

    def episode(self, task: int, *, held_out: bool = False) -> Environment:
        """A new attempt; those at one task differ by the policy's actions alone."""
        ...

    def name(self, task: int, *, held_out: bool = False) -> str:
        """Names a task in messages: "prompts.jsonl:12"."""
        ...

    def text(self, tokens: tuple[int, ...]) -> str:
        """Tokens as people read them."""
        ...


@runtime_checkable
class EnvironmentKind(Protocol):
    """A config class of the registry `environments`.

    Attributes:
      name: the name that selects it.
    """

    name: str

    def check(self, model: Any) -> None:
        """Raises a StackError where the environment cannot be used, or not with the run's model config."""
        ...

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        """Makes the tasks.

        Args:
          policy: tells the tokenizer, the chat template and the end tokens.
          seq_tokens: of an episode, at most.

        Raises:
          StackError: the tasks cannot be used; names one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer to a prompt, as rewards see it.

    Attributes:
      text: without the token that ended it.
      tokens: that the policy drew, the one that ended it included.
      record: what the task's record says besides, such as the right answer.
      is_finished: the policy ended it; False where a limit of tokens did.
      prompt_tokens: the prompt as the policy saw it.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    is_finished: bool
    record: Mapping[str, Any]
    prompt_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Score:
    """A reward with the verdict on the answer and measurements for people; its numbers may be of any library."""

    value: SupportsFloat
    verdict: Verdict | None = None
    facts: Mapping[str, SupportsFloat] = field(default_factory=dict)


@runtime_checkable
class Reward(Protocol):
    """Scores a completion; what it raises, and a value that is not finite, is a failure and no score."""

    def __call__(self, completion: Completion) -> SupportsFloat | Score | Awaitable[SupportsFloat | Score]: ...


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What an episode left: arrays[tokens], on the host.

    Attributes:
      group: number of the group; its trajectories are attempts at one task.
      tokens: int32, as the policy saw and drew them.
      sampled: bool, which of them it drew.
      logprobs: float32, log-probability of each by the distribution that it was drawn from; 0 of the others.
      versions: int32, of the weights that drew each; -1 of the others.
      rewards: float32, each at the last token of its action.
      is_truncated: a limit of tokens ended it.
      candidates: what each token was drawn from, where that was not the whole vocabulary: int32[tokens], how many, and
        int32[...], the candidates of all tokens in turn.
    """

    group: int
    task: int
    tokens: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    rewards: np.ndarray
    verdict: Verdict | None = None
    is_truncated: bool = False
    facts: Mapping[str, float] = field(default_factory=dict)
    candidates: tuple[np.ndarray, np.ndarray] | None = None
