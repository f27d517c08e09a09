"""Configs refuse what they do not know, say where, and survive a round trip through YAML."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, PositiveFloat, PositiveInt

from stack_core.abi.config import (
    Sections,
    Selected,
    apply_overrides,
    config,
    differences,
    dotted_keys,
    is_under,
    load_yaml,
    parse,
    parse_yaml,
    to_yaml,
    with_current_keys,
)
from stack_core.abi.errors import ConfigError, UnknownName
from stack_core.abi.registry import Entry, Registry


@config
class Square:
    shape: Literal["square"] = "square"
    side: PositiveInt = 1


@config
class Circle:
    shape: Literal["circle"] = "circle"
    radius: float = 1.0


@config
class Inner:
    steps: PositiveInt = 10
    name: str | None = None


@config
class Written:
    """Its hints are texts, as `from __future__ import annotations` makes them."""

    steps: "int" = 1
    several: "tuple[float, ...]" = ()
    path: "str | None" = None


@config
class Profile:
    every: int = 5


@config
class Kept:
    what: Literal["all", "none"] | Inner = "all"


@config
class Numbers:
    flag: bool = False
    optional: int | None = None
    several: tuple[int, ...] = ()
    named: Mapping[str, float] = Field(default_factory=dict)


SHAPES = Registry(
    "shapes", lambda: ({"square": Entry("square", Square, "p"), "circle": Entry("circle", Circle, "p")}, {})
)
SECTIONS = Registry(
    "configs",
    lambda: ({"profile": Entry("profile", Profile, "p")}, {}),
    lambda kind, name: f" `pip install stack-{name}` provides it.",
)


@config
class Outer:
    output: str
    figure: Annotated[Any, Selected(SHAPES, "shape")] = Square()
    backdrop: Annotated[Any, Selected(SHAPES, "shape")] = None
    inner: Inner = Inner()
    optional: Inner | None = None
    scalar: PositiveFloat | Inner = 1.0
    sections: Annotated[Mapping[str, Any], Sections(SECTIONS)] = Field(default_factory=dict)


@config
class Several:
    listed: tuple[Inner, ...] = ()
    named: Mapping[str, Inner] = Field(default_factory=dict)
    figures: Mapping[str, Annotated[Any, Selected(SHAPES, "shape")]] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"listed": [{}, {"step": 3}]}, r"^Unknown key 'holder.listed.1.step'. Did you mean 'steps'"),
        ({"listed": [{"steps": 0}]}, r"^holder.listed.0.steps: .*greater than 0"),
        ({"listed": [3]}, "^holder.listed.0 is 3; a mapping with keys of Inner"),
        ({"named": {"Code": {"steps": 0}}}, "^holder.named.Code.steps: .*greater than 0"),
        ({"named": {"layers/[01]": {"steps": 0}}}, r"^holder.named.layers/\[01\].steps: .*greater than 0"),
        ({"named": {"layers/[01]": {"step": 3}}}, r"^Unknown key 'holder.named.layers/\[01\].step'"),
        ({"figures": {"a": {"shape": "circle", "side": 1}}}, "^Unknown key 'holder.figures.a.side'"),
    ],
)
def test_mistakes_in_entries_have_the_path_of_the_entry(mapping, message):
    with pytest.raises(ConfigError, match=message):
        parse(Several, mapping, path="holder")
    assert parse(Several, {"listed": ({}, Inner(steps=2))}).listed == (Inner(), Inner(steps=2))


def test_defaults_and_nested_values():
    parsed = parse(Outer, {"output": "x", "inner": {"steps": 3}, "figure": {"shape": "circle", "radius": 2}})
    assert parsed == Outer(output="x", inner=Inner(steps=3), figure=Circle(radius=2.0))
    assert parse(Outer, {"output": "x", "figure": "circle"}).figure == Circle()


def test_a_field_may_be_a_number_or_settings():
    for given, expected in ((3, 3.0), ({"steps": 3}, Inner(steps=3))):
        parsed = parse(Outer, {"output": "x", "scalar": given})
        assert parsed.scalar == expected and parse(Outer, parse_yaml(to_yaml(parsed), "x")) == parsed
    for wrong, message in (("high", "scalar.*valid number"), (-1, "greater than 0"), ({"step": 1}, "scalar.step")):
        with pytest.raises(ConfigError, match=message):
            parse(Outer, {"output": "x", "scalar": wrong})


def test_settings_without_a_name_are_those_of_the_default():
    assert parse(Outer, {"output": "x", "figure": {"side": 4}}).figure == Square(side=4)


def test_sections_come_from_registered_classes():
    parsed = parse(Outer, {"output": "x", "profile": {"every": 7}})
    assert parsed.sections == {"profile": Profile(every=7)}


@config
class Moved:
    steps: int = 1
    moved_keys: ClassVar[dict[str, str]] = {"batches": "run.batches"}


def test_a_key_that_moved_is_refused_with_its_new_place():
    with pytest.raises(ConfigError, match=r"no key 'data.batches' any more: it is now run.batches"):
        parse(Moved, {"batches": 3}, path="data")


def test_a_resolved_config_survives_yaml(tmp_path):
    original = parse(
        Outer, {"output": "x", "optional": {"name": "ü: 1e-3"}, "profile": {}, "figure": {"shape": "circle"}}
    )
    path = tmp_path / "run.yaml"
    path.write_text(to_yaml(original), encoding="utf-8")
    assert parse(Outer, load_yaml(path)) == original


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (
            {"output": "x", "inner": {"step": 3}},
            r"Unknown key 'inner.step'. Did you mean 'steps'\? Inner has: steps, name",
        ),
        ({"output": "x", "inner": {"steps": "many"}}, r"inner.steps: .*integer.*given 'many'"),
        ({"output": "x", "inner": {"steps": 0}}, r"inner.steps: .*greater than 0"),
        ({"output": "x", "inner": 3}, "inner is 3; a mapping with keys of Inner was expected"),
        ({}, "output is missing"),
        (
            {"output": "x", "backdrop": {"radius": 2}},
            "backdrop lacks the key 'shape', which names one of: circle, square",
        ),
        ({"output": "x", "figure": {"shape": "square", "radius": 2}}, "Unknown key 'figure.radius'"),
        ({"output": "x", "iner": {}}, r"Unknown name 'iner' .* Did you mean 'inner'\?"),
        ({"output": "x", "tracer": {}}, "Registered: output, figure, backdrop, inner, optional, scalar, profile"),
        ({"output": "x", "side": 2}, r"Unknown name 'side' .* Did you mean 'figure.side'\?"),
        ({"output": "x", "figure": "circle", "radius": 2}, r"Did you mean 'figure.radius'\?"),
        ({"output": "x", "steps": 2}, r"Did you mean 'inner.steps'\?"),
        ({"output": "x", "sections": {}}, "Unknown name 'sections' among configs"),
    ],
)
def test_mistakes_name_the_place_and_the_remedy(mapping, message):
    with pytest.raises((ConfigError, UnknownName), match=message):
        parse(Outer, mapping)


@pytest.mark.parametrize(
    ("cls", "mapping", "message"),
    [
        (Outer, {"inner": {"steps": True}}, "inner.steps: .*integer.*given True"),
        (Outer, {"inner": {"steps": "300"}}, "inner.steps: .*integer.*given '300'"),
        (Outer, {"inner": {"steps": 3.0}}, "inner.steps: .*integer.*given 3.0"),
        (Outer, {"figure": {"shape": "circle", "radius": True}}, "figure.radius: .*number.*given True"),
        (Outer, {"figure": {"shape": "circle", "radius": "1.5"}}, "figure.radius: .*number.*given '1.5'"),
        (Numbers, {"flag": 1}, "flag: .*boolean.*given 1"),
        (Numbers, {"flag": "no"}, "flag: .*boolean.*given 'no'"),
        (Numbers, {"optional": True}, "optional.*integer.*given True"),
        (Numbers, {"several": [1, True]}, "several.1: .*integer.*given True"),
        (Numbers, {"named": {"a": True}}, "named.a: .*number.*given True"),
        (Written, {"steps": True}, "steps: .*integer.*given True"),
        (Written, {"several": ["1"]}, "several.0: .*number.*given '1'"),
        (Written, {"path": "s3://bucket/run"}, "path.*is an address of remote storage"),
    ],
)
def test_numbers_and_booleans_are_strict(cls, mapping, message):
    mapping = {"output": "x", **mapping} if cls is Outer else mapping
    with pytest.raises(ConfigError, match=message):
        parse(cls, mapping)


def test_scalars_are_those_of_yaml_1_2(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("[1e-3, 1E3, 010, 0o10, 0x10, 1:30, no, on, true, 2024-01-02, ~, null, -.5, .inf, 'true', '1e3']")
    text = path.read_text()
    expected = [1e-3, 1e3, 10, 8, 16, "1:30", "no", "on", True, "2024-01-02", None, None, -0.5, math.inf, "true", "1e3"]
    assert parse_yaml(f"values: {text}", "text")["values"] == expected
    assert parse_yaml(to_yaml({"values": expected}), "text")["values"] == expected
    assert apply_overrides({}, ["a=1e-4", "b=no", "c=true"]) == {"a": 1e-4, "b": "no", "c": True}


def test_a_config_that_is_called_takes_names_and_mappings_and_refuses_the_rest():
    called: Any = Outer
    made = called(output="x", figure="circle", inner={"steps": 3}, sections={"profile": {"every": 7}})
    assert made == Outer(output="x", figure=Circle(), inner=Inner(steps=3), sections={"profile": Profile(every=7)})
    assert called(output="x", figure={"shape": "circle", "radius": 2}).figure == Circle(radius=2.0)
    for wrong, message in (
        ({"figure": 3}, "figure is 3; expected a name, a mapping with the key 'shape'.* Names: circle, square"),
        ({"figure": {"radius": 2}}, "figure lacks the key 'shape'"),
        ({"figure": "circel"}, "Did you mean 'circle'"),
        ({"sections": {"profile": {"evry": 1}}}, "Unknown key 'profile.evry'"),
        ({"sections": 3}, "sections is 3"),
    ):
        with pytest.raises((ConfigError, UnknownName), match=message):
            called(output="x", **wrong)


def test_a_key_covers_itself_and_what_lies_inside_it():
    line = "optimizer.learning_rate: 0.1, not 0.2"
    assert is_under(line, ["optimizer"]) and is_under(line, ["optimizer.learning_rate"])
    assert not is_under(line, ["o", "optim", "optimizer.learning", "optimizer.learning_rate.x"])
    assert dotted_keys({"run": {"seed": 1}, "quant": {"rules": [{"weights": 4}]}}) == {
        *("run", "run.seed", "quant", "quant.rules", "quant.rules.0", "quant.rules.0.weights"),
    }


def test_unknown_selected_names_and_sections_name_their_neighbours():
    with pytest.raises(UnknownName, match="Did you mean 'circle'"):
        parse(Outer, {"output": "x", "figure": {"shape": "circel"}})
    with pytest.raises(UnknownName, match="`pip install stack-quant` provides it"):
        parse(Outer, {"output": "x", "quant": {}})


def test_overrides_set_nested_values_and_leave_the_original_alone():
    original = {"output": "x", "inner": {"steps": 3}}
    changed = apply_overrides(original, ["inner.steps=5", "figure.shape=circle", "inner.name=a=b"])
    assert changed == {"output": "x", "inner": {"steps": 5, "name": "a=b"}, "figure": {"shape": "circle"}}
    assert original == {"output": "x", "inner": {"steps": 3}}


@pytest.mark.parametrize("override", ["inner.steps", "inner..steps=3", "=3", "output.deep=3", "inner.steps=[1"])
def test_malformed_overrides_are_refused(override):
    with pytest.raises(ConfigError, match="Override"):
        apply_overrides({"output": "x"}, [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "not valid YAML"),
        ("a:\n\tb: 1", "Indent with spaces"),
        ("- 1\n", "holds a list"),
        ("a: 1\na: 2\n", "Key 'a' is written twice"),
        (f"a: {'9' * 5000}", "not valid YAML.*4300 digits"),
    ],
)
def test_yaml_that_is_no_config_is_refused(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_yaml(path)
    with pytest.raises(ConfigError, match="Cannot read"):
        load_yaml(tmp_path / "missing.yaml")


def test_differences_name_each_leaf():
    assert differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == ["a.c: 2, not 3", "d: None, not 4"]


def test_differences_in_lists_of_mappings_are_told_entry_by_entry() -> None:
    ours, theirs = {"rules": [{"a": 1}, {"b": 2}]}, {"rules": [{"a": 1}, {"b": 3}, {"c": 4}]}
    assert differences(ours, theirs) == ["rules.1.b: 2, not 3", "rules.2: None, not {'c': 4}"]
    assert differences({"a": [1, 2]}, {"a": [1, 3]}) == ["a: [1, 2], not [1, 3]"]


def test_configs_are_frozen_and_keyword_only():
    with pytest.raises((AttributeError, TypeError)):
        Inner().steps = 3
    with pytest.raises(ValueError, match="positional"):
        Inner(3)


def test_a_former_key_is_accepted_with_a_warning_that_names_the_new_one():
    @config
    class Renamed:
        figure: Annotated[Any, Selected(SHAPES, "shape", former="kind")] = Square()

    former, current = {"figure": {"kind": "circle", "radius": 2.0}}, {"figure": {"shape": "circle", "radius": 2.0}}
    with pytest.warns(FutureWarning, match=r"figure\.kind is now figure\.shape"):
        assert parse(Renamed, former) == parse(Renamed, current)
    assert with_current_keys(Renamed, former) == current  # a saved config: nobody to warn
    with pytest.raises(ConfigError, match=r"figure\.kind is the former name of figure\.shape"):
        parse(Renamed, {"figure": {"kind": "circle", "shape": "square"}})


def test_a_value_of_no_type_of_a_union_has_one_answer_without_types_of_python():
    with pytest.raises(ConfigError) as raised:
        parse(Kept, {"what": "some"})
    assert str(raised.value) == "what: Input should be 'all' or 'none', or a section of keys (given 'some')."
    with pytest.raises(ConfigError, match=r"what.steps: Input should be greater than 0 \(given -1\)"):
        parse(Kept, {"what": {"steps": -1}})
