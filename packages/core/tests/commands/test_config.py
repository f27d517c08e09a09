"""`stack config`: the keys that a command's config class accepts."""

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, PositiveInt

from stack_core.abi.config import Selected, config
from stack_core.abi.errors import UnknownName
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.commands.config import explain, keys
from stack_core.commands.config_keys import attribute_texts


@config
class Small:
    """A model.

    Attributes:
      width: features of each token, which are
        many.
      name: name of the model.
    """

    width: PositiveInt = 4
    name: str = "small"


@config
class Large(Small):
    """A larger model.

    Attributes:
      depth: number of layers.
    """

    depth: int
    name: str = "large"


MODELS = Registry[Any](
    "models", lambda: ({"small": Entry("small", Small, "acme"), "large": Entry("large", Large, "acme")}, {})
)


@config
class Inner:
    """Options.

    Attributes:
      low, high: bounds of the range.
      mode: way of rounding.

    Raises:
      low: not an attribute.
    """

    low: float = 0.0
    high: float | None = None
    mode: Literal["up", "down"] = "up"


@config
class Linear:
    """Linear scaling.

    Attributes:
      factor: the factor.
    """

    kind: Literal["linear"] = "linear"
    factor: float = 2.0


@config
class Ramp:
    """Scaling by a ramp.

    Attributes:
      start: where the ramp starts.
    """

    kind: Literal["ramp"] = "ramp"
    start: int = 1


@config
class Root:
    """The config of a command.

    Attributes:
      model: the model.
      inner: options.
      steps: options of each step.
      kept: names of kept values.
      scaling: the scaling.
    """

    model: Annotated[Any, Selected(MODELS)]
    inner: Inner = Inner()
    steps: tuple[Small, ...] = ()
    kept: Literal["none", "all"] | Small = "none"
    scaling: Annotated[Linear | Ramp, Field(discriminator="kind")] | None = None


@pytest.fixture(autouse=True)
def command(monkeypatch):
    entries = {
        "make": Entry("make", "x:y", "acme", {"config": f"{__name__}:Root"}),
        "look": Entry("look", "x:y", "acme"),
    }
    monkeypatch.setitem(registries._by_kind, "commands", Registry("commands", lambda: (entries, {})))


def listed(capsys, prefix=""):
    keys(prefix, command="make", json=True)
    return {key["name"]: key for key in json.loads(capsys.readouterr().out)}


def test_every_key_is_listed_with_type_default_and_text(capsys):
    found = listed(capsys)
    models = {"model.name", "model.width", "model.depth"}
    options = {"inner.low", "inner.high", "inner.mode"}
    unions = {"kept", "kept.width", "kept.name", "scaling.kind", "scaling.factor", "scaling.start"}
    assert set(found) == models | options | unions | {"steps", "steps[].width", "steps[].name"}
    assert set(listed(capsys, "inner.m")) == {"inner.mode"}
    assert found["inner.high"]["type"] == "float | None"
    assert found["inner.mode"]["type"] == "up | down"
    assert found["inner.low"]["text"] == found["inner.high"]["text"] == "bounds of the range."
    assert found["model.width"]["type"] == "int > 0"
    assert found["model.width"]["default"] == 4
    assert found["model.width"]["text"] == "features of each token, which are many."
    assert found["model.depth"]["required"]
    assert found["model.name"]["type"] == "large | small"
    assert (found["kept"]["type"], found["kept"]["default"]) == ("none | all | keys below", "none")
    assert (found["scaling.kind"]["type"], found["scaling.kind"]["text"]) == ("linear | ramp", "the scaling.")
    assert (found["scaling.start"]["selector"], found["scaling.start"]["selections"]) == ("scaling.kind", ["ramp"])


def test_keys_of_a_selected_class_say_when_they_exist(capsys):
    found = listed(capsys, "model")
    assert found["model.depth"]["selections"] == ["large"]
    assert found["model.width"]["selections"] == ["large", "small"]  # equal in both, so listed once
    explain("model.depth", command="make")
    assert "if: model.name is large" in capsys.readouterr().out


def test_the_table_fits_its_columns(capsys):
    keys(command="make")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110
    assert any(line.startswith("model.depth") and "required" in line for line in lines)


def test_wrong_names_are_answered_with_neighbours():
    with pytest.raises(UnknownName, match=r"Did you mean 'inner\.low'"):
        explain("inner.lo", command="make")
    with pytest.raises(UnknownName, match=r"is a section, not a key. It has: inner\.low, inner\.high"):
        explain("inner", command="make")
    with pytest.raises(UnknownName, match=r"'look' reads no config file.*do: make"):
        keys(command="look")


def test_a_subclass_inherits_texts():
    assert attribute_texts(Large) == {
        "width": "features of each token, which are many.",
        "name": "name of the model.",
        "depth": "number of layers.",
    }
