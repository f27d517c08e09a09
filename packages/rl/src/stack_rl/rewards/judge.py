"""`reward: judge`: a grade from a model behind an OpenAI endpoint."""

import asyncio
import functools
import itertools
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, EnvironmentFailed
from stack_rl.contracts import Completion, Reward, Score
from stack_rl.rewards.questions import check_question, fill_question
from stack_rl.rewards.unchecked import UncheckedPolicy, unchecked
from stack_rl.threads import Threads

__all__ = ["ChatJudge", "JudgeConfig"]

_QUESTION: Final = """\
Grade the answer to the question below, from 0 (useless or false) to {highest:g} (as good as can be).
End with a line that says "Grade: " and the number.

Question:
{prompt}

Answer:
{response}
"""
# A number after the word "grade" and optional brackets: "Grade (0-10): 8". Ranges, percentages and "8,5" do not match.
_PATTERN: Final = (
    r"(?i)\bgrade\b(?:\s*\([^()\n]*\))?[\s:=*_`]*(?:is\b[\s:=*_`]*)?"
    r"([-+]?(?:\d+(?:\.\d+)?|\.\d+))(?![A-Za-z0-9%]|[.,]\d|\s*[-\N{EN DASH}]\s*\d)"
)
_SCALE: Final = re.compile(r"\s*(?:/|out of)\s*(\d+(?:\.\d+)?)")
# Timeouts, conflicts, rate limits and server errors, after which a later attempt may succeed.
_AGAIN: Final = (408, 409, 429, 500, 502, 503, 504)


@config
class JudgeConfig:
    """Requests a grade from a chat model and scales it to 0 to 1.

    An endpoint that cannot be reached fails the episode and is not a grade.

    Attributes:
      url: URL of the API, such as "http://localhost:8000/v1".
      model: name of the model at the API.
      name: selects this reward.
      question: text of the request, with placeholders `{prompt}`, `{response}` (the policy's answer), `{highest}` and
        the record's fields, such as `{answer}`, the reference answer.
      pattern: regular expression with one group; the group of the last match is the grade.
      highest: best possible grade, which becomes a reward of 1.
      key_variable: environment variable with the API key; None sends no key.
      max_tokens: maximum number of tokens of the judge's answer.
      temperature: sampling temperature of the judge's answer.
      attempts: maximum number of attempts if the endpoint is busy or cannot be reached.
      timeout_s: time limit of one attempt in seconds.
      at_once: maximum number of concurrent requests.
      seed: sampling seed sent with each request.
      unchecked: handling of an answer without a readable grade: "drop" the episode, count it as "wrong" or "stop" the
        run.
    """

    url: str
    model: str
    name: Literal["judge"] = "judge"
    question: str = _QUESTION
    pattern: str = _PATTERN
    highest: PositiveFloat = 10.0
    key_variable: str | None = None
    max_tokens: PositiveInt = 512
    temperature: float = Field(default=0.0, ge=0.0)
    attempts: PositiveInt = 4
    timeout_s: PositiveFloat = 120.0
    at_once: PositiveInt = 16
    seed: NonNegativeInt = 0
    unchecked: UncheckedPolicy = "drop"

    def __post_init__(self) -> None:
        try:
            groups = re.compile(self.pattern).groups
        except re.error as error:
            raise ConfigError(f"The judge's pattern {self.pattern!r} is not a regular expression: {error}.") from error
        if groups != 1:
            raise ConfigError(f"The judge's pattern {self.pattern!r} has {groups} groups; expected one, the grade.")
        check_question(self.question, reward=self.name, required={"response": "the policy's answer"})
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"The judge's url is {self.url!r}; it must begin with http:// or https://.")
        if self.key_variable is not None and self.key_variable not in os.environ:
            raise ConfigError(f"The judge's key_variable is {self.key_variable!r}, but that variable is not set.")

    def build(self) -> Reward:
        return ChatJudge(self)


class ChatJudge:
    """A chat model behind an OpenAI endpoint, which grades answers."""

    def __init__(self, settings: JudgeConfig) -> None:
        self._settings = settings
        self._threads = Threads(settings.at_once)

    async def __call__(self, completion: Completion) -> Score:
        settings = self._settings
        values = {"prompt": completion.prompt, "response": completion.text, "highest": settings.highest}
        question = fill_question(settings.question, reward=settings.name, record=completion.record, values=values)
        reply = await self.ask(question)
        grade = _grade(settings, reply)
        if grade is None:
            return unchecked(settings.unchecked, "unparsed", f"no grade in the judge's answer {reply[-200:]!r}")
        return Score(value=grade / settings.highest)

    async def ask(self, question: str) -> str:
        """Sends a question to the judge and returns its answer.

        Raises:
          EnvironmentFailed: the judge cannot be reached or responds with an error.
        """
        for attempt in itertools.count(1):
            try:
                return await self._threads.run(functools.partial(self._post, question))
            except urllib.error.HTTPError as error:
                with error:  # closes the connection
                    reason = f"{error.code} {error.read(500).decode(errors='replace')}"
                if error.code not in _AGAIN:
                    break
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt == self._settings.attempts:
                break
            await asyncio.sleep(min(0.25 * 2**attempt, 15.0))
        raise EnvironmentFailed(f"the judge at {self._settings.url} did not answer: {reason}")

    def _post(self, question: str) -> str:
        settings = self._settings
        body: Mapping[str, Any] = {
            "model": settings.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": settings.max_tokens,
            "temperature": settings.temperature,
            "seed": settings.seed,
        }
        headers = {"Content-Type": "application/json"}
        if settings.key_variable is not None:
            headers["Authorization"] = f"Bearer {os.environ[settings.key_variable]}"
        request = urllib.request.Request(
            f"{settings.url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=settings.timeout_s) as response:
            found = json.loads(response.read())
        return str(found["choices"][0]["message"]["content"])


def _grade(settings: JudgeConfig, reply: str) -> float | None:
    """Returns the last grade in a text, or None for a missing grade, one out of range or one on another scale."""
    matches = list(re.finditer(settings.pattern, reply))
    if not matches:
        return None
    scale = _SCALE.match(reply, matches[-1].end())
    try:
        grade = float(matches[-1][1])
    except (TypeError, ValueError):  # the user's pattern may match anything
        return None
    is_other_scale = scale is not None and float(scale[1]) != settings.highest
    return grade if 0 <= grade <= settings.highest and not is_other_scale else None
