"""Episodes of post-training: their times, tokens and rewards, from the events of stack-rl."""

from dataclasses import dataclass

import numpy as np

from stack_profile.answer import Answer
from stack_profile.traces.operations import PICOSECOND
from stack_profile.traces.trace import Trace
from stack_profile.traces.work_spans import work_spans

__all__ = ["RolloutRow", "rollouts"]


@dataclass(frozen=True)
class RolloutRow:
    """An episode that ended in the capture.

    Attributes:
      name: its group and task.
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


def rollouts(trace: Trace) -> Answer[RolloutRow]:
    """Lists the episodes that a run of stack-rl played, the longest first."""
    spans = [span for space in trace.spaces for span in work_spans(space, trace.base_ns)]
    found = [span for span in spans if span.name == "rollout"]
    scored = [span.end_ps - span.start_ps for span in spans if span.name == "reward"]
    if not found:
        return Answer("rollouts", {}, RolloutRow, (), ("No data: the trace has no episodes of stack-rl.",))
    start_ps = min(span.start_ps for span in found)
    rows = [
        RolloutRow(
            name=f"group {span.fields['group']}, task {span.fields['task']}",
            start_s=(span.start_ps - start_ps) * PICOSECOND,
            duration_s=(span.end_ps - span.start_ps) * PICOSECOND,
            turns=span.fields["turns"],
            tokens=span.fields["tokens"],
            reward=span.fields["reward"],
            failure=span.fields["failure"] or "",
        )
        for span in found
    ]
    facts = {
        "rollouts": len(rows),
        "tokens": sum(row.tokens for row in rows),
        "mean_reward": float(np.mean([row.reward for row in rows])),
        "start_s": start_ps * PICOSECOND,
        "elapsed_s": (max(span.end_ps for span in found) - start_ps) * PICOSECOND,
        "median_rollout_s": float(np.median([row.duration_s for row in rows])),
        "longest_rollout_s": max(row.duration_s for row in rows),
        "rewards": len(scored),
        "mean_reward_s": float(np.mean(scored)) * PICOSECOND if scored else None,
    }
    return Answer("rollouts", facts, RolloutRow, tuple(sorted(rows, key=lambda row: -row.duration_s)))
