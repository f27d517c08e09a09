"""Each plugin loads in its own guard; what fails is reported and stops no other."""

import importlib
import re
import sys
from importlib.metadata import EntryPoint

import pytest

from stack_core.errors import PluginError, UnknownName
from stack_core.plugins import Plugins, Registries

GROUP = "stack.plugins.v1"
HEADER = "from stack_core.plugins import hookimpl\nSTACK_ABI_MINOR = 0\n"


@pytest.fixture
def plugins_of(tmp_path, monkeypatch):
    """Writes modules and returns the Plugins that finds them: {name: source}, all in one group unless given."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def build(sources, environ=None, groups=None):
        for name, source in sources.items():
            (tmp_path / f"plugin_{name}.py").write_text(source)
            written.append(f"plugin_{name}")
        importlib.invalidate_caches()
        points = [EntryPoint(name, f"plugin_{name}", (groups or {}).get(name, GROUP)) for name in sources]
        return Plugins(points, environ or {})

    yield build
    for name in written:
        sys.modules.pop(name, None)


def models_of(plugins):
    return Registries(plugins).models


def report_of(plugins, name):
    return next(report for report in plugins.reports() if report.name == name)


def value_plugin(name):
    return HEADER + f"@hookimpl\ndef stack_register_models(registry): registry.add('{name}', {name!r}.upper)\n"


def test_a_good_plugin_registers_and_is_reported(plugins_of):
    plugins = plugins_of({"good": value_plugin("good")})
    assert models_of(plugins)["good"]() == "GOOD"
    report = report_of(plugins, "good")
    assert (report.status, report.abi, report.registered) == ("loaded", "1.0", {"models": ("good",)})


BROKEN = {
    "import_error": ("import no_such_module_anywhere", "ModuleNotFoundError"),
    "syntax_error": ("def broken(:", "SyntaxError"),
    "no_minor": ("x = 1", "STACK_ABI_MINOR"),
    "newer_minor": ("STACK_ABI_MINOR = 99", r"needs plugin ABI 1\.99; this core offers 1\.0"),
    "misspelled": (
        HEADER + "@hookimpl\ndef stack_register_model(registry): pass",
        "unknown hook 'stack_register_model'. Did you mean 'stack_register_models'",
    ),
    "wrong_argument": (HEADER + "@hookimpl\ndef stack_register_models(registri): pass", "registri"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_reported_once_and_stops_no_other(plugins_of, kind):
    source, reason = BROKEN[kind]
    plugins = plugins_of({kind: source, "good": value_plugin("good")})
    assert models_of(plugins).names() == ("good",)
    report = report_of(plugins, kind)
    assert report.status == "failed"
    assert len(report.problems) == 1
    assert re.search(reason, report.problems[0])


def test_a_hook_that_raises_costs_only_its_own_names(plugins_of):
    raising = (
        HEADER
        + "@hookimpl\ndef stack_register_models(registry):\n    registry.add('x', 1)\n    raise OSError('boom')\n"
    )
    plugins = plugins_of({"raising": raising, "good": value_plugin("good")})
    assert models_of(plugins).names() == ("good",)
    assert "OSError: boom" in report_of(plugins, "raising").problems[0]


def test_another_abi_major_is_never_imported(plugins_of, tmp_path):
    mark = tmp_path / "imported"
    source = f"open({str(mark)!r}, 'w').close()\nSTACK_ABI_MINOR = 0\n"
    plugins = plugins_of({"future": source}, groups={"future": "stack.plugins.v2"})
    report = report_of(plugins, "future")
    assert report.status == "failed" and "ABI 2" in report.problems[0]
    assert not mark.exists()


def test_two_plugins_that_claim_one_name_are_both_refused_and_named(plugins_of):
    plugins = plugins_of({"one": value_plugin("same"), "two": value_plugin("same"), "good": value_plugin("good")})
    models = models_of(plugins)
    assert models.names() == ("good",)
    with pytest.raises(PluginError, match="'one' and 'two'"):
        models["same"]
    for name in ("one", "two"):
        assert "'one' and 'two'" in report_of(plugins, name).problems[0]


@pytest.mark.parametrize(
    ("variable", "value", "left"),
    [
        ("STACK_DISABLE_PLUGINS", "one", ("core", "two")),
        ("STACK_DISABLE_PLUGINS", "one, two", ("core",)),
        ("STACK_LOAD_PLUGINS", "one", ("core", "one")),
    ],
)
def test_plugins_are_blocked_and_selected_by_environment(plugins_of, variable, value, left):
    sources = {name: value_plugin(name) for name in ("core", "one", "two")}
    plugins = plugins_of(sources, environ={variable: value})
    assert models_of(plugins).names() == left
    assert {report.name for report in plugins.reports() if report.status == "blocked"} == set(sources) - set(left)


def test_installed_core_registers_its_reference_ops():
    from stack_core.plugins import registries

    assert "attention/reference" in registries.ops
    with pytest.raises(AttributeError, match="Did you mean 'models'"):
        _ = registries.model
    with pytest.raises(UnknownName):
        registries.rewards["no_such_reward"]
