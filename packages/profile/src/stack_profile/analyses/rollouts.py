"""Episodes of post-training: their times, tokens and rewards, from the events of stack-rl."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from stack_profile.answer import Answer
from stack_profile.traces.operations import PICOSECOND
from stack_profile.traces.trace import Trace
from stack_profile.traces.work_spans import WorkSpan, rollout_groups, work_spans

__all__ = ["RolloutGroupRow", "RolloutRow", "RolloutsGrouping", "rollouts"]

RolloutsGrouping = Literal["group", "episode"]


@dataclass(frozen=True)
class RolloutRow:
    """An episode that ended in the capture.

    Attributes:
      name: its group and task, and its number in the group.
      start_s: start since the start of the first episode.
      duration_s: seconds from its start to its end.
      turns: number of actions.
      tokens: number of tokens, including prompts and observations.
      reward: sum of its rewards.
      failure: error message of a failed episode, or "".
    """

    name: str
    start_s: float
    duration_s: float
    turns: int
    tokens: int
    reward: float
    failure: str


@dataclass(frozen=True)
class RolloutGroupRow:
    """The episodes of one task that are compared with each other, as far as they ended in the capture.

    Attributes:
      name: group and task.
      start_s: start of its first episode since the start of the first group.
      duration_s: seconds from the start of its first episode to the end of its last.
      episodes: number of episodes.
      longest_s: duration of its longest episode.
      turns: mean number of actions.
      tokens: number of tokens of all episodes.
      reward: mean reward.
      lowest, highest: range of the rewards; equal rewards give no advantage.
      failures: number of failed episodes.
    """

    name: str
    start_s: float
    duration_s: float
    episodes: int
    longest_s: float
    turns: float
    tokens: int
    reward: float
    lowest: float
    highest: float
    failures: int


def rollouts(trace: Trace, *, by: RolloutsGrouping = "group") -> Answer[Any]:
    """List the episodes that a run of stack-rl played, the longest first.

    Args:
      by: one row for each group of episodes of one task, or for each episode.
    """
    row_type = RolloutGroupRow if by == "group" else RolloutRow
    processes = [work_spans(space, trace.base_ns) for space in trace.spaces]
    groups = [group for spans in processes for group in rollout_groups(spans)]
    scored = [span.end_ps - span.start_ps for spans in processes for span in spans if span.name == "reward"]
    found = [span for group in groups for span in group]
    if not found:
        return Answer("rollouts", {}, row_type, (), ("No data: the trace has no episodes of stack-rl.",))
    start_ps = min(span.start_ps for span in found)
    rewards = [span.fields["reward"] for span in found]
    facts = {
        "rollouts": len(found),
        "groups": len(groups),
        "flat_groups": sum(len({span.fields["reward"] for span in group}) == 1 for group in groups),
        "tokens": sum(span.fields["tokens"] for span in found),
        "mean_reward": float(np.mean(rewards)),
        "start_s": start_ps * PICOSECOND,
        "elapsed_s": (max(span.end_ps for span in found) - start_ps) * PICOSECOND,
        "median_rollout_s": float(np.median([span.end_ps - span.start_ps for span in found])) * PICOSECOND,
        "longest_rollout_s": max(span.end_ps - span.start_ps for span in found) * PICOSECOND,
        "rewards": len(scored),
        "mean_scoring_s": float(np.mean(scored)) * PICOSECOND if scored else None,
    }
    if by == "group":
        rows: list[Any] = [_group(group, start_ps) for group in groups]
    else:
        rows = [_episode(place, span, start_ps) for group in groups for place, span in enumerate(group)]
    notes = ("A flat group has equal rewards, which give no advantage.",) if facts["flat_groups"] else ()
    return Answer(f"rollouts by {by}", facts, row_type, tuple(sorted(rows, key=lambda row: -row.duration_s)), notes)


def _named(span: WorkSpan) -> str:
    return f"group {span.fields['group']}, task {span.fields['task']}"


def _episode(place: int, span: WorkSpan, start_ps: int) -> RolloutRow:
    return RolloutRow(
        name=f"{_named(span)}, episode {place + 1}",
        start_s=(span.start_ps - start_ps) * PICOSECOND,
        duration_s=(span.end_ps - span.start_ps) * PICOSECOND,
        turns=span.fields["turns"],
        tokens=span.fields["tokens"],
        reward=span.fields["reward"],
        failure=span.fields["failure"] or "",
    )


def _group(group: Sequence[WorkSpan], start_ps: int) -> RolloutGroupRow:
    first, rewards = min(span.start_ps for span in group), [span.fields["reward"] for span in group]
    return RolloutGroupRow(
        name=_named(group[0]),
        start_s=(first - start_ps) * PICOSECOND,
        duration_s=(max(span.end_ps for span in group) - first) * PICOSECOND,
        episodes=len(group),
        longest_s=max(span.end_ps - span.start_ps for span in group) * PICOSECOND,
        turns=float(np.mean([span.fields["turns"] for span in group])),
        tokens=sum(span.fields["tokens"] for span in group),
        reward=float(np.mean(rewards)),
        lowest=min(rewards),
        highest=max(rewards),
        failures=sum(bool(span.fields["failure"]) for span in group),
    )
