import json
import math
from typing import Any

import pytest

from stack_core.abi.config import parse
from stack_core.abi.engines import Engine
from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.abi.generation import Constraint, SamplingParams

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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "given: none"),
        ({"regex": "a", "grammar": "b"}, "given: regex, grammar"),
        ({"regex": "a", "whitespace": ""}, "needs json_schema"),
    ],
)
def test_a_constraint_has_one_language(given: dict[str, str], message: str) -> None:
    with pytest.raises(GenerationError, match=message) as caught:
        Constraint(**given)
    assert caught.value.parameter == "constraint"


def test_schemas_keep_the_order_of_their_keys_and_are_equal_however_they_are_given() -> None:
    schema = {"type": "object", "properties": {"b": True, "a": {"const": "\N{SNOWMAN}"}}}
    made = Constraint(json_schema=schema)  # pyrefly: ignore[bad-argument-type]
    assert json.loads(made.json_schema or "") == schema
    assert (made.json_schema or "").index('"b"') < (made.json_schema or "").index('"a"')
    assert made == Constraint(json_schema=made.json_schema) == parse(Constraint, {"json_schema": schema})
    assert len({made, Constraint(json_schema=made.json_schema)}) == 1
    assert parse(SamplingParams, {"constraint": {"choice": ["a", "b"]}}).constraint == Constraint(choice=("a", "b"))


def test_an_engine_refuses_constraints_unless_it_implements_them() -> None:
    with pytest.raises(GenerationError, match="does not support constraints") as caught:
        Engine.compile_constraint(object(), Constraint(regex="a"))  # type: ignore[arg-type]
    assert caught.value.parameter == "constraint"


def test_texts_of_a_request_may_begin_like_an_address_of_remote_storage():
    address = "s3://bucket"
    assert SamplingParams(stop=(address,)).stop == (address,)
    for fields in ({"regex": address}, {"choice": (address,)}, {"grammar": address}):
        assert vars(Constraint(**fields))[next(iter(fields))] == next(iter(fields.values()))
