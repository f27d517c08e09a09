"""Distributions that are wrong in every way there is: each is reported once, none stops another."""

import re
from pathlib import Path

import pytest

from stack_core.abi.ops import ABI_MINOR

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.2"

[project.entry-points."{group}"]
{plugin} = "{module}"
"""
HEADER = "from stack_core import hookimpl\nSTACK_ABI_MINOR = 0\n"
REWARDS = HEADER + "@hookimpl\ndef stack_register_rewards(registry): "

BAD = {
    "acme-import-error": ("import no_such_module", "failed", "ModuleNotFoundError: No module named 'no_such_module'"),
    "acme-syntax-error": ("def broken(:", "failed", "SyntaxError"),
    "acme-exit": ("import sys; sys.exit('gone')", "failed", "SystemExit: gone"),
    "acme-no-minor": ("", "failed", "does not define the integer STACK_ABI_MINOR"),
    "acme-newer-minor": (
        f"STACK_ABI_MINOR = {ABI_MINOR + 1}",
        "failed",
        rf"needs plugin ABI 1\.{ABI_MINOR + 1}, and this core offers 1\.{ABI_MINOR}; update stack-core",
    ),
    "acme-misspelled": (
        HEADER + "@hookimpl\ndef stack_register_reward(registry): ...",
        "failed",
        "unknown hook 'stack_register_reward'. Did you mean 'stack_register_rewards'",
    ),
    "acme-unmarked": (HEADER + "def stack_register_rewards(registry): ...", "failed", "without @hookimpl"),
    "acme-raising": (REWARDS + "registry.add('kind', 1); 1 / 0", "incomplete", "ZeroDivisionError: division by zero"),
    "acme-nameless": (REWARDS + "registry.add(None, 1)", "incomplete", "rewards None: expected a name"),
    "acme-no-target": (REWARDS + "registry.add('kind', 'module')", "incomplete", "'module:attribute'"),
    "acme-detail": (
        HEADER + "@hookimpl\ndef stack_register_commands(registry): registry.add('wish', 1, hlep='?')",
        "incomplete",
        "unknown detail 'hlep'. Did you mean 'help'",
    ),
}


@pytest.fixture
def project(tmp_path):
    """Writes the source of a distribution with one module, and returns its folder."""

    def write(name, source, group="stack.plugins.v1", plugin=None):
        folder, module = tmp_path / name, name.replace("-", "_")
        folder.mkdir()
        (folder / f"{module}.py").write_text(source)
        text = PYPROJECT.format(name=name, group=group, module=module, plugin=plugin or name)
        (folder / "pyproject.toml").write_text(text)
        return folder

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_is_reported_once_and_stops_no_other(environment, project, name):
    source, status, reason = BAD[name]
    before = environment.plugins()
    with environment.installed(project(name, source)):
        after = environment.plugins()
    report = after.pop(name)
    assert after == before
    assert (report["version"], report["status"], report["registered"]) == ("1.2", status, {})
    assert len(report["problems"]) == 1
    assert re.search(reason, report["problems"][0])


def test_all_bad_plugins_at_once_leave_every_command_working(environment, project):
    before = environment.plugins()
    with environment.installed(*(project(name, source) for name, (source, _, _) in BAD.items())):
        after = environment.plugins()
        shown = environment.stack("--help")
    assert {name: after[name] for name in before} == before
    for name, (_, status, reason) in BAD.items():
        report = after[name]
        assert (report["version"], report["status"], report["registered"]) == ("1.2", status, {})
        (problem,) = report["problems"]
        assert re.search(reason, problem)
    assert "plugins" in shown.stdout
    noted = re.findall(r"^stack: plugin '(acme-.*?)' is (?:left out|incomplete): ", shown.stderr, re.MULTILINE)
    # Starting up reads the commands: what is wrong with other entries shows when they are asked for.
    known = [name for name, (source, status, _) in BAD.items() if status == "failed" or "_commands" in source]
    assert sorted(noted) == sorted(known)
    assert environment.plugins() == before


def canary(path: Path) -> str:
    return f"open({str(path)!r}, 'w').close()\n"


def test_another_abi_major_is_never_imported(environment, project, tmp_path):
    sings = tmp_path / "imported"
    with environment.installed(project("acme-future", canary(sings) + REWARDS + "...", group="stack.plugins.v2")):
        report = environment.plugins()["acme-future"]
        environment.stack("--help")
    assert (report["status"], report["abi"], report["registered"]) == ("failed", "2", {})
    assert "built for plugin ABI 2, and this core offers ABI 1" in report["problems"][0]
    assert not sings.exists()


def test_the_canary_would_have_sung(environment, project, tmp_path):
    sings = tmp_path / "imported"
    with environment.installed(project("acme-present", canary(sings) + REWARDS + "registry.add('kind', len)")):
        environment.run("-c", "import stack_core")
        assert not sings.exists(), "importing core loads no plugin"
        report = environment.plugins()["acme-present"]
    assert (report["status"], report["registered"]) == ("loaded", {"rewards": ["kind"]})
    assert sings.exists()


def test_two_plugins_of_one_name_are_both_refused_and_named(environment, project):
    twins = [project(f"acme-{side}", REWARDS + f"registry.add('{side}', len)", plugin="same") for side in ("l", "r")]
    with environment.installed(*twins):
        both = environment.plugins()
        one = environment.plugins(STACK_DISABLE_PLUGINS="acme-l")
    for name in ("acme-l", "acme-r"):
        assert (both[name]["status"], both[name]["registered"], len(both[name]["problems"])) == ("failed", {}, 1)
        assert "'acme-l' and 'acme-r' each name their plugin 'same'" in both[name]["problems"][0]
    assert (one["acme-l"]["status"], one["acme-r"]["registered"]) == ("blocked", {"rewards": ["r"]})


def test_two_entries_of_one_name_are_both_refused_and_named(environment, project):
    twins = [
        project(f"acme-{side}", REWARDS + f"registry.add('same', len); registry.add('{side}', len)")
        for side in ("l", "r")
    ]
    with environment.installed(*twins):
        reports = environment.plugins()
        asked = environment.run(
            "-c", "from stack_core import registries; registries.rewards['same']", check=False
        ).stderr
    for side in ("l", "r"):
        report = reports[f"acme-{side}"]
        assert (report["status"], report["registered"]) == ("incomplete", {"rewards": [side]})
        assert len(report["problems"]) == 1
        assert "plugins 'acme-l' and 'acme-r' each register it" in report["problems"][0]
    assert "PluginError: rewards 'same' is not available: plugins 'acme-l' and 'acme-r'" in asked


@pytest.mark.parametrize("environ", [{"STACK_DISABLE_PLUGINS": "acme-blocked"}, {"STACK_LOAD_PLUGINS": "train"}])
def test_what_the_environment_leaves_out_is_not_imported(environment, project, tmp_path, environ):
    sings = tmp_path / "imported"
    with environment.installed(project("acme-blocked", canary(sings) + REWARDS + "registry.add('kind', len)")):
        reports = environment.plugins(**environ)
    (variable,) = environ
    assert reports["acme-blocked"]["status"] == "blocked"
    assert variable in reports["acme-blocked"]["problems"][0]
    assert [reports[name]["status"] for name in ("stack-core", "stack-train")] == ["loaded", "loaded"]
    assert not sings.exists()


def test_a_command_that_cannot_be_called_leaves_the_others(environment, project):
    source = HEADER + "@hookimpl\ndef stack_register_commands(registry): registry.add('wish', 1)"
    with environment.installed(project("acme-wish", source)):
        shown = environment.stack("--help")
    assert "stack: command 'wish' of plugin 'acme-wish' is left out" in shown.stderr
    assert "plugins" in shown.stdout
