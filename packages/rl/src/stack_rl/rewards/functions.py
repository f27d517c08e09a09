"""Rewards of answers that can be compared with a right one, which a task's record holds as `answer`."""

from stack_rl.contracts import Completion, Score

__all__ = ["characters", "exact", "right_answer"]


def exact(completion: Completion) -> Score:
    """1 for the right answer, spaces around it left out, else 0; an answer that the policy did not end is wrong."""
    right = completion.is_finished and completion.text.strip() == right_answer(completion)
    return Score(value=float(right), verdict="correct" if right else "wrong")


def characters(completion: Completion) -> float:
    """The share of characters that are those of the right answer at their place; what is too long counts as wrong."""
    text, answer = completion.text.strip(), right_answer(completion)
    same = sum(ours == theirs for ours, theirs in zip(text, answer, strict=False))
    return same / max(len(text), len(answer), 1)


def right_answer(completion: Completion) -> str:
    """The record's `answer`.

    Raises:
      KeyError: it has none.
    """
    if "answer" not in completion.record:
        fields = ", ".join(map(repr, completion.record)) or "none"
        raise KeyError(f"the record has no 'answer' to compare with; its other fields: {fields}")
    return str(completion.record["answer"]).strip()
