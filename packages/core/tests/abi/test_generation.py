import math
from typing import Any

import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError
from stack_core.abi.generation import SamplingParams

FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*FLOATS, "logit_bias"])
def test_numbers_are_finite(name: str, value: float) -> None:
    given: Any = {5: value} if name == "logit_bias" else value
    with pytest.raises(ConfigError, match=name):
        parse(SamplingParams, {name: given})


@pytest.mark.parametrize("stop", [("x",) * 17, ("x" * 257,), ("",)])
def test_stop_texts_are_few_and_short(stop: tuple[str, ...]) -> None:
    assert SamplingParams(stop=("x" * 256,) * 16)
    with pytest.raises(ConfigError, match="stop"):
        parse(SamplingParams, {"stop": stop})
