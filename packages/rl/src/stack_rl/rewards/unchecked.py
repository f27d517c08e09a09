"""Handling of answers that could not be checked, which differ from wrong answers."""

from typing import Literal

from stack_core.abi.errors import EnvironmentFailed
from stack_rl.contracts import Score, Verdict

__all__ = ["Unchecked", "UncheckedPolicy", "unchecked"]

UncheckedPolicy = Literal["drop", "wrong", "stop"]
"""Handling of an unchecked answer: "drop" and count the episode, count the answer as "wrong", or "stop" the run."""


class Unchecked(Exception):  # named for the answer's status rather than an error
    """Raised for an answer whose episode is to be dropped, regardless of `data.on_failure`."""


def unchecked(policy: UncheckedPolicy, verdict: Verdict, reason: str) -> Score:
    """Returns the score of an answer whose check did not finish.

    Raises:
      Unchecked: the policy is "drop".
      EnvironmentFailed: the policy is "stop".
    """
    if policy == "drop":
        raise Unchecked(f"{verdict}: {reason}")
    if policy == "stop":
        raise EnvironmentFailed(f"an answer could not be checked ({verdict}): {reason}")
    return Score(value=0.0, verdict=verdict)
