"""`reward: math`: 1 if the answer equals the reference value in any notation, else 0."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import Final, Literal

from pydantic import NonNegativeFloat

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, SandboxError
from stack_core.abi.installing import install_command
from stack_rl.contracts import Completion, Reward, Score, Verdict
from stack_rl.rewards.answers import extract, is_same
from stack_rl.rewards.expressions import plain
from stack_rl.rewards.functions import right_answer
from stack_rl.rewards.sandbox import Sandbox, SandboxConfig
from stack_rl.rewards.unchecked import UncheckedPolicy, unchecked

__all__ = ["MathConfig"]


_SKIPPED: Final = re.compile(r"[$'\"]|\\approx|≈")
"""Signs that math-verify drops together with the text after them; answers with such signs are not sent to it."""
_SANDBOX: Final = SandboxConfig(wall_s=30.0, cpu_s=20)  # importing SymPy takes seconds


@config
class MathConfig:
    r"""Compares the final answer of a text, such as in \boxed{}, with the record's `answer`.

    Both answers are parsed completely and compared exactly: fractions, roots, polynomials, percentages, units,
    equations, sets, tuples, intervals and unions. If an answer cannot be parsed or the comparison is undecided,
    math-verify decides if it is installed; otherwise the reward is 0 with the verdict "unparsed". math-verify is only a
    fallback, and is configured to keep units: used alone with its defaults, it accepts 12ab for 12, 50% for 50, and 5 m
    for 5 cm.

    Attributes:
      name: selects this reward.
      tolerance: maximum relative difference between a number and the reference; 0 compares exactly.
      library: "auto" uses math-verify (the extra `math`) if it is installed, "math_verify" requires it, "none" never
        uses it. It runs in a sandbox, because it may hang.
      unchecked: handling of an answer that math-verify did not finish: "drop" the episode, count it as "wrong" or
        "stop" the run.
      sandbox: limits of the sandbox for math-verify.
    """

    name: Literal["math"] = "math"
    tolerance: NonNegativeFloat = 0.0
    library: Literal["auto", "math_verify", "none"] = "auto"
    unchecked: UncheckedPolicy = "drop"
    sandbox: SandboxConfig = _SANDBOX

    def check(self) -> None:
        """Raises a ConfigError if math-verify is required but not installed."""
        if self.library == "math_verify" and not _is_installed():
            command = install_command("stack-rl[math]")
            raise ConfigError(f"The reward 'math' with library: math_verify needs math-verify: {command}")

    def build(self) -> Reward:
        self.check()
        return _Math(self)


# Only the LaTeX parser is used, which parses the complete text or fails; other parsers search for a number anywhere.
# `units` is off because it deletes letters ("ab", "t", "h") as units. Numbers must agree to 12 decimal places, not 6.
_PROGRAM: Final = """
import json, sys
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
normalization = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
extraction = [LatexExtractionConfig(normalization_config=normalization)]
given = json.load(sys.stdin)
ours, theirs = (
    parse("$" + given[side] + "$", extraction, parsing_timeout=None, fallback_mode="no_fallback")
    for side in ("ours", "theirs")
)
if not ours or not theirs:
    print("unparsed")
else:
    print("same" if verify(theirs, ours, float_rounding=12, strict=True, timeout_seconds=None) else "other")
"""


def _is_installed() -> bool:
    return find_spec("math_verify") is not None


class _Math:
    def __init__(self, settings: MathConfig) -> None:
        self._settings = settings
        self._uses_library = settings.library != "none" and _is_installed()
        if self._uses_library:
            _ = self._sandbox  # raises here, before the run begins

    @cached_property
    def _sandbox(self) -> Sandbox:
        try:
            sandbox = Sandbox(self._settings.sandbox)
            sandbox.check_libraries()
        except SandboxError as error:
            raise SandboxError(f"{error} Or compare without math-verify: library: none.") from error
        return sandbox

    async def __call__(self, completion: Completion) -> Score:
        theirs, ours = right_answer(completion), extract(completion.text)
        if ours is None or not completion.is_finished:
            return Score(value=0.0, verdict="unparsed", parsed=ours)
        same = is_same(ours, theirs, tolerance=self._settings.tolerance)
        if same is not None:
            return Score(value=float(same), verdict="correct" if same else "wrong", parsed=ours)
        pair = {"ours": plain(ours), "theirs": plain(theirs)}
        if not self._uses_library or any(_SKIPPED.search(text) for text in pair.values()):
            return Score(value=0.0, verdict="unparsed", parsed=ours)
        return replace(await self._verified(pair), parsed=ours)

    async def _verified(self, pair: Mapping[str, str]) -> Score:
        encoded = json.dumps(pair).encode()
        ended = await self._sandbox.run_soon(_PROGRAM, stdin=encoded, libraries=True)
        word = ended.output.decode(errors="replace").strip()
        if ended.succeeded and word in ("same", "other", "unparsed"):
            verdicts: dict[str, Verdict] = {"same": "correct", "other": "wrong", "unparsed": "unparsed"}
            return Score(value=float(word == "same"), verdict=verdicts[word])
        reason = f"math-verify on {pair['ours']!r}: {ended.errors.decode(errors='replace')[-200:]}"
        verdict: Verdict = "timeout" if ended.status in ("timeout", "killed") else "crash"
        return unchecked(self._settings.unchecked, verdict, reason)
