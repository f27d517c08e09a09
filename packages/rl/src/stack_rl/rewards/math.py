"""`reward: math`: 1 for an answer that is the right value, however it is written, else 0."""

import json
from functools import cached_property
from typing import Any, Final, Literal

from pydantic import NonNegativeFloat

from stack_core.config import config
from stack_core.contracts.environments import Completion, Reward, Score, Verdict
from stack_rl.rewards.answers import extracted, same_answer
from stack_rl.rewards.functions import right_answer
from stack_rl.rewards.sandbox import Sandbox, SandboxConfig
from stack_rl.rewards.unchecked import UncheckedPolicy, unchecked

__all__ = ["MathConfig"]


_SANDBOX: Final = SandboxConfig(wall_s=30.0, cpu_s=20)  # a library takes seconds to be imported


@config
class MathConfig:
    r"""Compares the answer that a text ends with, such as in \boxed{}, with the record's `answer`.

    Fractions, decimals, percentages, units, sets, tuples and intervals are compared as values, here. What that does not
    tell to be equal, such as formulas, a library may compare, which runs in a sandbox, as it may hang.

    Attributes:
      tolerance: how far numbers may be apart, as a share of the right one.
      library: for what is left, which must be installed: "sympy", which reads plain formulas such as x^2 + 1, or
        "math_verify", which reads LaTeX too. None takes what is left for wrong.
      unchecked: what becomes of an answer that the library did not come to an end with.
      sandbox: that the library runs in.
    """

    name: Literal["math"] = "math"
    tolerance: NonNegativeFloat = 0.0
    library: Literal["sympy", "math_verify"] | None = None
    unchecked: UncheckedPolicy = "drop"
    sandbox: SandboxConfig = _SANDBOX

    def build(self) -> Reward:
        return _Math(self)


_PROGRAMS: Final = {
    "sympy": """
import json, sys
from sympy import simplify
from sympy.parsing.sympy_parser import implicit_multiplication_application, parse_expr
from sympy.parsing.sympy_parser import standard_transformations as known
given = json.load(sys.stdin)
read = lambda text: parse_expr(text.replace("^", "**"), transformations=(*known, implicit_multiplication_application))
try:
    ours, theirs = read(given["ours"]), read(given["theirs"])
except Exception:
    print("unparsed")
else:
    print("same" if simplify(ours - theirs) == 0 else "other")
""",
    "math_verify": """
import json, sys
from math_verify import parse, verify
given = json.load(sys.stdin)
wrap = lambda text: parse("$" + text + "$", parsing_timeout=None)
ours, theirs = wrap(given["ours"]), wrap(given["theirs"])
print("unparsed" if not ours else "same" if verify(theirs, ours, timeout_seconds=None) else "other")
""",
}


class _Math:
    def __init__(self, settings: MathConfig) -> None:
        self._settings = settings
        if settings.library is not None:
            _ = self._sandbox  # refuses before the run begins

    @cached_property
    def _sandbox(self) -> Sandbox:
        return Sandbox(self._settings.sandbox)

    async def __call__(self, completion: Completion) -> Score:
        theirs, ours = right_answer(completion), extracted(completion.text)
        if ours is None or not completion.is_finished:
            return Score(value=0.0, verdict="unparsed")
        if same_answer(ours, theirs, tolerance=self._settings.tolerance):
            return Score(value=1.0, verdict="correct")
        if self._settings.library is None:
            return Score(value=0.0, verdict="wrong")
        return await self._compared(self._settings.library, {"ours": ours, "theirs": theirs})

    async def _compared(self, library: str, given: dict[str, Any]) -> Score:
        encoded = json.dumps(given).encode()
        ended = await self._sandbox.run_soon(_PROGRAMS[library], given=encoded, libraries=True)
        word = ended.output.decode(errors="replace").strip()
        if ended.succeeded and word in ("same", "other", "unparsed"):
            verdicts: dict[str, Verdict] = {"same": "correct", "other": "wrong", "unparsed": "unparsed"}
            return Score(value=float(word == "same"), verdict=verdicts[word])
        reason = f"{library} on {given['ours']!r}: {ended.errors.decode(errors='replace')[-200:]}"
        verdict: Verdict = "timeout" if ended.how in ("timeout", "killed") else "crash"
        return unchecked(self._settings.unchecked, verdict, reason)
