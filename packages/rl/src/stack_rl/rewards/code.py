"""`reward: code`: the share of tests that an answer's program passes, in a sandbox."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from stack_core.config import config
from stack_core.contracts.environments import Completion, Reward, Score
from stack_core.errors import EnvironmentFailed
from stack_rl.rewards.sandbox import Ended, Sandbox, SandboxConfig
from stack_rl.rewards.unchecked import UncheckedPolicy, unchecked

__all__ = ["CodeConfig"]


@config
class CodeConfig:
    """Runs the last block of code of an answer, or all of an answer without one, against the record's tests.

    `tests` is a list of `{"input": text, "output": text}`: what the program reads and is to write, spaces at the ends
    of lines left out. Or it is one text of Python that follows the program and asserts; it runs in the program's own
    process, so a program that sets out to fool it can.

    Attributes:
      whole: only all tests together are worth 1; else each is worth its share.
      unchecked: what becomes of a program that ran out of a limit.
      sandbox: that programs run in.
    """

    name: Literal["code"] = "code"
    whole: bool = True
    unchecked: UncheckedPolicy = "wrong"
    sandbox: SandboxConfig = SandboxConfig()

    def build(self) -> Reward:
        return _Code(self, Sandbox(self.sandbox))


class _Code:
    def __init__(self, settings: CodeConfig, sandbox: Sandbox) -> None:
        self._settings, self._sandbox = settings, sandbox

    async def __call__(self, completion: Completion) -> Score:
        tests, program = completion.record.get("tests"), _program(completion.text)
        if not completion.is_finished or not program.strip():
            return Score(value=0.0, verdict="unparsed")
        if isinstance(tests, str):
            return await self._asserted(program, tests)
        if not isinstance(tests, Sequence) or not tests or not all(map(_is_test, tests)):
            raise EnvironmentFailed(
                f"the record's 'tests' are {tests!r}; give a text of asserts, or objects with 'input' and 'output'"
            )
        passed = 0
        for done, test in enumerate(tests, start=1):
            ended = await self._sandbox.run_soon(program, given=str(test["input"]).encode())
            if (score := self._unfinished(ended)) is not None:
                return score
            passed += ended.succeeded and _lines(ended.output.decode(errors="replace")) == _lines(str(test["output"]))
            if self._settings.whole and passed < done:
                break
        share = passed / len(tests)
        right = share == 1.0
        return Score(
            value=float(right) if self._settings.whole else share,
            verdict="correct" if right else "wrong",
            facts={"passed": share},
        )

    async def _asserted(self, program: str, tests: str) -> Score:
        word = secrets.token_hex(16)  # which a program that leaves early does not write
        ended = await self._sandbox.run_soon(f"{program}\n\n{tests}\n\nprint({word!r})")
        if (score := self._unfinished(ended)) is not None:
            return score
        right = ended.succeeded and ended.output.decode(errors="replace").rstrip().endswith(word)
        return Score(value=float(right), verdict="correct" if right else "wrong")

    def _unfinished(self, ended: Ended) -> Score | None:
        """The score of a program that ran out of a limit."""
        if ended.how == "exit":
            return None
        verdict = "crash" if ended.how == "flood" or (ended.how == "killed" and ended.code != -24) else "timeout"
        return unchecked(self._settings.unchecked, verdict, f"the program ended by {ended.how} {ended.code}")


def _is_test(test: Any) -> bool:
    return isinstance(test, Mapping) and {"input", "output"} <= test.keys()


def _program(text: str) -> str:
    blocks = re.findall(r"```(?:python|py)?[^\S\n]*\n(.*?)```", text, flags=re.DOTALL)
    return blocks[-1] if blocks else text


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
