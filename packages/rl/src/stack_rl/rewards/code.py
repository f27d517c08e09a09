"""`reward: code`: the fraction of tests that an answer's program passes in a sandbox."""

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from markdown_it import MarkdownIt

from stack_core.abi.config import config
from stack_core.abi.errors import EnvironmentFailed
from stack_rl.contracts import Completion, Reward, Score
from stack_rl.rewards.sandbox import ProgramResult, Sandbox, SandboxConfig
from stack_rl.rewards.unchecked import UncheckedPolicy, unchecked

__all__ = ["CodeConfig"]

_MARKDOWN: Final = MarkdownIt("commonmark")
_PYTHON: Final = frozenset(("python", "python3", "py", "py3", "ipython", "ipython3"))


@config
class CodeConfig:
    """Runs the last Python block of an answer against the record's tests.

    Blocks are fenced as in CommonMark. A block without a language counts if no block is marked as Python. An answer
    without blocks is itself the program; an answer with only blocks of other languages contains no program.

    `tests` is either a list of `{"input": text, "output": text}`, the standard input and the expected output, compared
    without trailing spaces. Or it is Python source with assertions that is appended to the program. The assertions run
    in the process of the program, so a malicious program can fool them.

    Attributes:
      name: selects this reward.
      whole: True gives reward 1 if all tests pass, else 0. False gives the fraction of passed tests.
      libraries: True lets programs import the packages installed alongside stack, such as NumPy.
      unchecked: handling of a program that exceeded a limit: "drop" the episode, count it as "wrong" or "stop" the run.
      sandbox: sandbox for the programs.
    """

    name: Literal["code"] = "code"
    whole: bool = True
    libraries: bool = True
    unchecked: UncheckedPolicy = "wrong"
    sandbox: SandboxConfig = SandboxConfig()

    def build(self) -> Reward:
        return _Code(self, Sandbox(self.sandbox))


class _Code:
    def __init__(self, settings: CodeConfig, sandbox: Sandbox) -> None:
        self._settings, self._sandbox = settings, sandbox
        if settings.libraries:
            sandbox.check_libraries()  # raises here, before the run begins

    async def __call__(self, completion: Completion) -> Score:
        tests, program = completion.record.get("tests"), _program(completion.text)
        if not completion.is_finished or not program.strip():
            return Score(value=0.0, verdict="unparsed", parsed=program or None)
        if isinstance(tests, str):
            return await self._asserted(program, tests)
        if not isinstance(tests, Sequence) or not tests or not all(map(_is_test, tests)):
            raise EnvironmentFailed(
                f"the record's 'tests' are {tests!r}; give a text of asserts, or objects with 'input' and 'output'"
            )
        passed = 0
        for done, test in enumerate(tests, start=1):
            ended = await self._run(program, str(test["input"]))
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
            parsed=program,
            facts={"passed": share},
        )

    async def _asserted(self, program: str, tests: str) -> Score:
        word = secrets.token_hex(16)  # printed after the tests, and so missing if the program exits early
        ended = await self._run(f"{program}\n\n{tests}\n\nprint({word!r})")
        if (score := self._unfinished(ended)) is not None:
            return score
        right = ended.succeeded and ended.output.decode(errors="replace").rstrip().endswith(word)
        return Score(value=float(right), verdict="correct" if right else "wrong", parsed=program)

    async def _run(self, program: str, stdin: str = "") -> ProgramResult:
        encoded = stdin.encode(errors="surrogatepass")
        return await self._sandbox.run_soon(program, stdin=encoded, libraries=self._settings.libraries)

    def _unfinished(self, result: ProgramResult) -> Score | None:
        """Returns the score of a program that exceeded a limit, or None if the program finished."""
        if result.status == "exit":
            return None
        # Signal 24 is SIGXCPU: the program used up its CPU time.
        verdict = (
            "crash" if result.status == "flood" or (result.status == "killed" and result.code != -24) else "timeout"
        )
        return unchecked(self._settings.unchecked, verdict, f"the program ended by {result.status} {result.code}")


def _is_test(test: Any) -> bool:
    return isinstance(test, Mapping) and {"input", "output"} <= test.keys()


def _program(text: str) -> str:
    """Extracts the program of an answer; empty if it has none."""
    fences = [token for token in _MARKDOWN.parse(text) if token.type == "fence"]
    if not fences:
        return text
    languages = [_language(token.info) for token in fences]
    chosen = [token.content for token, language in zip(fences, languages, strict=True) if language in _PYTHON]
    unnamed = [token.content for token, language in zip(fences, languages, strict=True) if not language]
    return (chosen or unnamed or [""])[-1]


def _language(info: str) -> str:
    """Returns the language of a fence in lower case, from `python` or an attribute such as `{.python}`."""
    found = re.match(r"\s*\{?\s*\.?([\w+#-]*)", info)
    return found[1].lower() if found else ""


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
