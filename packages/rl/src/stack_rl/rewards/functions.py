"""Rewards that compare an answer with the `answer` of the task's record."""

from stack_rl.contracts import Completion, Score

__all__ = ["characters", "exact", "right_answer"]


def exact(completion: Completion) -> Score:
    """Returns 1 if the stripped text equals the reference answer, else 0; an unfinished answer is wrong."""
    right = completion.is_finished and completion.text.strip() == right_answer(completion)
    return Score(value=float(right), verdict="correct" if right else "wrong", parsed=completion.text.strip())


def characters(completion: Completion) -> float:
    """Returns the fraction of characters that match the reference answer position by position.

    The denominator is the length of the longer text, so missing and extra characters count as wrong.
    """
    text, answer = completion.text.strip(), right_answer(completion)
    same = sum(ours == theirs for ours, theirs in zip(text, answer, strict=False))
    return same / max(len(text), len(answer), 1)


def right_answer(completion: Completion) -> str:
    """Returns the record's `answer` as stripped text.

    Raises:
      KeyError: the record lacks an `answer`.
    """
    if "answer" not in completion.record:
        fields = ", ".join(map(repr, completion.record)) or "none"
        raise KeyError(f"the record has no 'answer' to compare with; its other fields: {fields}")
    return str(completion.record["answer"]).strip()
