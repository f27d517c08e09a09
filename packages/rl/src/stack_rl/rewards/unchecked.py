"""What becomes of an answer that could not be checked, which is not the same as a wrong one."""

from typing import Literal

from stack_core.abi.errors import EnvironmentFailed
from stack_rl.contracts import Score, Verdict

__all__ = ["Unchecked", "UncheckedPolicy", "unchecked"]

UncheckedPolicy = Literal["drop", "wrong", "stop"]
"""Its episode is left out and counted; or it is worth 0 and its verdict is counted; or the run stops."""


class Unchecked(Exception):  # it says what an answer is
    """An answer whose episode is to be left out, whatever `data.on_failure` says of failures."""


def unchecked(policy: UncheckedPolicy, verdict: Verdict, reason: str) -> Score:
    """The score of an answer whose check did not come to an end.

    Raises:
      Unchecked: the policy is "drop".
      EnvironmentFailed: it is "stop".
    """
    if policy == "drop":
        raise Unchecked(f"{verdict}: {reason}")
    if policy == "stop":
        raise EnvironmentFailed(f"an answer could not be checked ({verdict}): {reason}")
    return Score(value=0.0, verdict=verdict)
