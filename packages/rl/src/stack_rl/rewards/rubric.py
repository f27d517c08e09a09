"""`reward: rubric`: a weighted sum of named criteria."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from stack_core.abi.config import config
from stack_core.abi.data import Tokenizer
from stack_core.abi.errors import ConfigError
from stack_rl.contracts import Completion, Reward, Score
from stack_rl.rewards.weighted import ReadsTokens, WeightedReward, as_weighted, check_reward, resolved, total_score

__all__ = ["RubricConfig"]


@config
class RubricConfig:
    r"""Scores an answer by several criteria, each with a name of its own.

        reward = \sum_i w_i s_i,    or with `normalize`, \sum_i w_i s_i / \sum_i |w_i|

    s_i, w_i: score and weight of criterion i. Each score is a fact under the criterion's name, so a reward such as
    `judge` may occur several times with different settings; facts of a criterion have its name as a prefix. The verdict
    is the verdict of the criterion `verdict_of`, or of the first criterion with a verdict.

    With `required`, the reward is 0 unless the scores of these criteria are positive; a rubric can thereby demand a
    format without rewarding it.

    Attributes:
      criteria: rewards by name; each may be wrapped as `reward` with a `weight`.
      name: selects this reward.
      normalize: divide by the sum of the weights' absolute values.
      required: names of the required criteria.
      verdict_of: name of the criterion that provides the verdict; None takes the first verdict.
    """

    criteria: Annotated[Mapping[str, Annotated[WeightedReward, BeforeValidator(as_weighted)]], Field(min_length=1)]
    name: Literal["rubric"] = "rubric"
    normalize: bool = False
    required: tuple[str, ...] = ()
    verdict_of: str | None = None

    def check(self) -> None:
        """Checks the criteria without loading models."""
        named = [*self.required, *([] if self.verdict_of is None else [self.verdict_of])]
        if unknown := [each for each in named if each not in self.criteria]:
            raise ConfigError(
                f"The rubric's required or verdict_of names {unknown[0]!r}; its criteria are "
                f"{', '.join(self.criteria)}."
            )
        if self.normalize and not any(each.weight for each in self.criteria.values()):
            raise ConfigError("The rubric's weights are all 0, which normalize cannot divide by. Set one of them.")
        for each in self.criteria.values():
            check_reward(each.reward)

    def build(self) -> Reward:
        self.check()
        rewards = {name: resolved(each.reward)[1] for name, each in self.criteria.items()}
        return _Rubric(self, rewards)


@dataclass(frozen=True)
class _Rubric:
    settings: RubricConfig
    rewards: Mapping[str, Reward]

    def check(self, tokenizer: Tokenizer | None) -> None:
        """Checks the tokenizer of criteria that read tokens; see `ReadsTokens`."""
        for each in self.rewards.values():
            if isinstance(each, ReadsTokens):
                each.check(tokenizer)

    async def __call__(self, completion: Completion) -> Score:
        settings, total, facts = self.settings, 0.0, dict[str, float]()
        scores, is_allowed = dict[str, Score](), True
        for name, criterion in settings.criteria.items():
            found = await total_score([(name, self.rewards[name], 1.0)], completion)
            score, scores[name] = float(found.value), found
            total += criterion.weight * score
            is_allowed = is_allowed and (name not in settings.required or score > 0)
            facts |= {each if each == name else f"{name}.{each}": float(value) for each, value in found.facts.items()}
        if settings.normalize:
            total /= sum(abs(each.weight) for each in settings.criteria.values())
        first = next((each for each in scores.values() if each.verdict is not None), Score(value=0.0))
        checked = first if settings.verdict_of is None else scores[settings.verdict_of]
        value = total if is_allowed else 0.0
        return Score(value=value, verdict=checked.verdict, facts=facts, parsed=checked.parsed)
