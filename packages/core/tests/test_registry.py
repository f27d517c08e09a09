"""Registries resolve lazily, freeze, and answer unknown names with their neighbours."""

import sys

import pytest

from stack_core.errors import PluginError, UnknownName
from stack_core.registry import Entry, Registrar, Registry


def registry(entries, refused=(), provider_of=lambda kind, name: None):
    calls = []

    def load():
        calls.append(1)
        return {entry.name: entry for entry in entries}, dict(refused)

    return Registry("models", load, provider_of), calls


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


def test_unknown_names_suggest_neighbours():
    models, _ = registry([Entry("llama", 1, "p"), Entry("qwen", 2, "p")])
    with pytest.raises(UnknownName, match=r"'lama' among models. Did you mean 'llama'\? Registered: llama, qwen"):
        models["lama"]


def test_unknown_names_name_the_package_that_would_provide_them():
    models, _ = registry([], provider_of=lambda kind, name: "stack-train")
    with pytest.raises(UnknownName, match="`pip install stack-train` provides it"):
        models["llama"]


def test_refused_names_say_why():
    models, _ = registry([], refused={"llama": "plugins 'a' and 'b' both register it"})
    with pytest.raises(PluginError, match="'a' and 'b' both"):
        models["llama"]


@pytest.mark.parametrize("target", ["no_such_module_anywhere:x", "decimal:NoSuchAttribute"])
def test_targets_that_cannot_be_loaded_name_their_plugin(target):
    models, _ = registry([Entry("x", target, "stranger")])
    with pytest.raises(PluginError, match=r"'x' of plugin 'stranger' cannot be loaded"):
        models["x"]


def test_registrars_refuse_malformed_and_repeated_names():
    registrar = Registrar("models", "p")
    with pytest.raises(PluginError, match="module:attribute"):
        registrar.add("x", "module.attribute")
    registrar.add("x", 1)
    with pytest.raises(PluginError, match="twice"):
        registrar.add("x", 2)
