"""Registries resolve lazily, freeze, and answer unknown names with their neighbours."""

import sys

import pytest

from stack_core.abi.errors import PluginError, UnknownName
from stack_core.abi.registry import Entry, Registrar, Registry


def registry(entries, refused=(), advise=lambda kind, name: ""):
    calls = []

    def load():
        calls.append(1)
        return {entry.name: entry for entry in entries}, dict(refused)

    return Registry("models", load, advise), calls


def test_a_string_target_is_imported_on_first_use_only():
    sys.modules.pop("this_stdlib_probe", None)
    models, calls = registry([Entry("decimal", "decimal:Decimal", "p")])
    assert not calls
    assert models.names() == ("decimal",)
    import decimal

    assert models["decimal"] is decimal.Decimal
    assert models["decimal"] is models["decimal"]
    assert calls == [1]


def test_object_targets_are_returned_as_they_are():
    models, _ = registry([Entry("x", 3, "p", {"help": "three"})])
    assert models["x"] == 3
    assert models.entries()[0].details["help"] == "three"
    assert "x" in models and "y" not in models


def test_a_registry_is_a_mapping():
    models, calls = registry([Entry("b", 2, "p"), Entry("a", "decimal:Decimal", "p")], refused={"c": "two claim it"})
    assert not calls
    assert len(models) == 2 and list(models) == ["a", "b"] and models.get("b") == 2
    assert models.get("d") is None and models.get("d", 4) == 4
    with pytest.raises(PluginError, match="two claim it"):
        models.get("c")
    assert dict(models) == dict(models.items()) == {"a": models["a"], "b": 2}
    assert hash(models) and models != registry([])[0]


def test_unknown_names_suggest_neighbours():
    models, _ = registry([Entry("llama", 1, "p"), Entry("qwen", 2, "p")])
    with pytest.raises(UnknownName, match=r"'lama' among models. Did you mean 'llama'\? Registered: llama, qwen"):
        models["lama"]


def test_unknown_names_say_where_they_may_come_from():
    models, _ = registry([], advise=lambda kind, name: f" Ask for {kind} {name}.")
    with pytest.raises(UnknownName, match=r"Ask for models llama\. Registered: none\."):
        models["llama"]


def test_refused_names_say_why():
    models, _ = registry([], refused={"llama": "plugins 'a' and 'b' both register it"})
    with pytest.raises(PluginError, match="'a' and 'b' both"):
        models["llama"]


@pytest.mark.parametrize("target", ["no_such_module_anywhere:x", "decimal:NoSuchAttribute", "torn_module:x"])
def test_targets_that_cannot_be_loaded_name_their_plugin(target, tmp_path, monkeypatch):
    (tmp_path / "torn_module.py").write_text("def broken(:")
    monkeypatch.syspath_prepend(tmp_path)
    models, _ = registry([Entry("x", target, "stranger")])
    with pytest.raises(PluginError, match=r"'x' of plugin 'stranger' cannot be loaded"):
        models["x"]


@pytest.mark.parametrize(
    ("kind", "name", "target", "details", "reason"),
    [
        ("models", "x", "module.attribute", {}, "'module:attribute'"),
        ("models", "x", "module:", {}, "'module:attribute'"),
        ("models", "", 1, {}, "expected a name of letters"),
        ("models", "--x", 1, {}, "expected a name of letters"),
        ("ops", "linear", 1, {}, "of the form op/implementation"),
        ("analyses", "input-pipeline", 1, {}, "of letters, digits and _"),
        ("analyses", "export", 1, {}, "`stack profile export` is a command of its own"),
        ("commands", "x", 1, {"hlep": "text"}, "unknown detail 'hlep'. Did you mean 'help'"),
        ("commands", "x", 1, {"help": 3}, "help is 3; expected a str"),
    ],
)
def test_registrars_refuse_what_is_malformed(kind, name, target, details, reason):
    registrar = Registrar(kind, "p", {"help": str})
    with pytest.raises(PluginError, match=reason):
        registrar.add(name, target, **details)
    assert registrar.close() == ()


def test_registrars_refuse_a_name_twice_and_any_name_after_the_hook():
    registrar = Registrar("models", "p")
    registrar.add("x", 1)
    with pytest.raises(PluginError, match="twice"):
        registrar.add("x", 2)
    assert [(entry.name, entry.target) for entry in registrar.close()] == [("x", 1)]
    with pytest.raises(PluginError, match="too late"):
        registrar.add("y", 2)
