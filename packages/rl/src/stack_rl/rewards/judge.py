"""`reward: judge`: a grade that a model behind an OpenAI endpoint gives an answer."""

import asyncio
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.config import config
from stack_core.contracts.environments import Completion, Reward, Score
from stack_core.errors import ConfigError, EnvironmentFailed
from stack_rl.rewards.unchecked import UncheckedPolicy, unchecked

__all__ = ["JudgeConfig"]

_QUESTION: Final = """\
Grade the answer to the question below, from 0 (useless or false) to {highest:g} (as good as can be).
End with a line that says "Grade: " and the number.

Question:
{prompt}

Answer:
{answer}
"""
_AGAIN: Final = (408, 409, 429, 500, 502, 503, 504)


@config
class JudgeConfig:
    """Asks a chat model for a grade, which is scaled to 0 to 1.

    An endpoint that cannot be reached is a failure, and no grade.

    Attributes:
      url: of the API, such as "http://localhost:8000/v1".
      model: the name that it has there.
      question: what it is asked; `{prompt}`, `{answer}`, `{highest}` and the record's fields are filled in.
      pattern: a regular expression whose last match holds the grade as its group.
      highest: the best grade.
      key_variable: of the environment, which holds the API's key.
      max_tokens, temperature: of its answer.
      attempts: how often it is asked where it is busy.
      timeout_s: of one attempt.
      at_once: questions that wait for it at the same time.
      unchecked: what becomes of an answer whose grade cannot be read.
    """

    url: str
    model: str
    name: Literal["judge"] = "judge"
    question: str = _QUESTION
    pattern: str = r"(?i)grade\W*(-?\d+(?:\.\d+)?)"
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
            raise ConfigError(f"The judge's pattern {self.pattern!r} is no regular expression: {error}.") from error
        if groups != 1:
            raise ConfigError(f"The judge's pattern {self.pattern!r} has {groups} groups; one holds the grade.")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"The judge's url is {self.url!r}; it begins with http:// or https://.")
        if self.key_variable is not None and self.key_variable not in os.environ:
            raise ConfigError(f"The judge's key is to be in {self.key_variable}, which the environment does not have.")

    def build(self) -> Reward:
        return _Judge(self)


class _Judge:
    def __init__(self, settings: JudgeConfig) -> None:
        self._settings = settings
        self._askers = ThreadPoolExecutor(settings.at_once, thread_name_prefix="judge")

    async def __call__(self, completion: Completion) -> Score:
        settings = self._settings
        filled = {"prompt": completion.prompt, "answer": completion.text, "highest": settings.highest}
        question = settings.question.format_map({**completion.record, **filled})
        said = await self._asked(question)
        grades = re.findall(settings.pattern, said)
        if not grades or not 0 <= float(grades[-1]) <= settings.highest:
            return unchecked(settings.unchecked, "unparsed", f"the judge said {said[-200:]!r}")
        return Score(value=float(grades[-1]) / settings.highest)

    async def _asked(self, question: str) -> str:
        """What the judge says.

        Raises:
          EnvironmentFailed: it cannot be reached, or answers with an error.
        """
        for attempt in range(self._settings.attempts):
            try:
                return await asyncio.get_running_loop().run_in_executor(self._askers, self._post, question)
            except urllib.error.HTTPError as error:
                reason = f"{error.code} {error.read(500).decode(errors='replace')}"
                if error.code not in _AGAIN:
                    break
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            await asyncio.sleep(min(2.0**attempt, 30.0) * 0.5)
        raise EnvironmentFailed(f"the judge at {self._settings.url} gives no answer: {reason}")

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
