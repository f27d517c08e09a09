"""`reward: pairwise`: a model's preference between the policy's answer and another answer."""

import re
from typing import Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import EnvironmentFailed
from stack_rl.contracts import Completion, Reward, Score
from stack_rl.rewards.judge import ChatJudge, JudgeConfig
from stack_rl.rewards.questions import check_question, fill_question
from stack_rl.rewards.unchecked import UncheckedPolicy, unchecked

__all__ = ["PairwiseConfig"]

_QUESTION: Final = """\
Which of the two answers to the question below is better? Judge by correctness first, then by clarity.
End with a line that says "Better: " and A, B or tie.

Question:
{prompt}

Answer A:
{first}

Answer B:
{second}
"""
_CHOICE: Final = re.compile(r"(?i)\bbetter\b[\s:=*_`]*(?:is\b[\s:=*_`]*)?(?:answer\s+|a\s+(?=tie\b))?(a|b|tie)\b")


@config
class PairwiseConfig:
    """Asks a chat model whether the policy's answer is better than an answer in the record.

    The model is asked twice, with the answers in both orders, because judges prefer a position. The reward is the mean
    of both: 1 for the policy's answer, 0.5 for a tie, 0 for the other one. The fact `consistent` is 1 if both orders
    have the same result. An answer that a token limit cut is compared as it is.

    An endpoint that cannot be reached fails the episode and is not a preference.

    Attributes:
      url: URL of the API, such as "http://localhost:8000/v1".
      model: name of the model at the API.
      name: selects this reward.
      against: field of the record with the other answer.
      question: text of the request, with placeholders `{prompt}`, `{first}`, `{second}` and the record's fields.
      key_variable, max_tokens, temperature, attempts, timeout_s, at_once, seed: as for `judge`.
      unchecked: handling of an answer without a readable preference, as for `judge`.

    Source: Zheng et al., Judging LLM-as-a-judge, 2023 (arXiv:2306.05685), section 3.4. Departures: (1) the paper counts
    inconsistent preferences as ties; their mean is the same 0.5.
    """

    url: str
    model: str
    name: Literal["pairwise"] = "pairwise"
    against: str = "answer"
    question: str = _QUESTION
    key_variable: str | None = None
    max_tokens: PositiveInt = 512
    temperature: float = Field(default=0.0, ge=0.0)
    attempts: PositiveInt = 4
    timeout_s: PositiveFloat = 120.0
    at_once: PositiveInt = 16
    seed: NonNegativeInt = 0
    unchecked: UncheckedPolicy = "drop"

    def __post_init__(self) -> None:
        required = {"first": "the answer shown as A", "second": "the answer shown as B"}
        check_question(self.question, reward=self.name, required=required)
        self._judge()

    def _judge(self) -> JudgeConfig:
        """Returns the settings of the requests, and raises like them."""
        names = (
            "url",
            "model",
            "key_variable",
            "max_tokens",
            "temperature",
            "attempts",
            "timeout_s",
            "at_once",
            "seed",
        )
        return JudgeConfig(**{name: getattr(self, name) for name in names})

    def build(self) -> Reward:
        return _Pairwise(self, ChatJudge(self._judge()))


class _Pairwise:
    def __init__(self, settings: PairwiseConfig, judge: ChatJudge) -> None:
        self._settings, self._judge = settings, judge

    async def __call__(self, completion: Completion) -> Score:
        settings, record = self._settings, completion.record
        if settings.against not in record:
            fields = ", ".join(map(repr, record)) or "none"
            raise EnvironmentFailed(
                f"the record lacks {settings.against!r} to compare with; its other fields: {fields}"
            )
        pair, values = (completion.text, str(record[settings.against])), list[float]()
        for answers, win in ((pair, "a"), (pair[::-1], "b")):
            filled = {"prompt": completion.prompt, "first": answers[0], "second": answers[1]}
            question = fill_question(settings.question, reward=settings.name, record=record, values=filled)
            reply = await self._judge.ask(question)
            choices = _CHOICE.findall(reply)
            if not choices:
                reason = f"no preference in the judge's answer {reply[-200:]!r}"
                return unchecked(settings.unchecked, "unparsed", reason)
            choice = choices[-1].lower()
            values.append(0.5 if choice == "tie" else float(choice == win))
        return Score(value=sum(values) / 2, facts={"consistent": float(values[0] == values[1])})
