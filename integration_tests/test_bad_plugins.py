"""Distributions that are wrong in every way there is: each is reported once, none stops another."""

import re
from pathlib import Path
from types import SimpleNamespace

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


# Plugins that only go wrong beside others: two of one name, and two with an entry of the same name.
TOGETHER = {
    "acme-left": (REWARDS + "registry.add('left', len)", "same"),
    "acme-right": (REWARDS + "registry.add('right', len)", "same"),
    "acme-first": (REWARDS + "registry.add('same', len); registry.add('first', len)", "first"),
    "acme-second": (REWARDS + "registry.add('same', len); registry.add('second', len)", "second"),
}
READ = """
import pathlib, stack_core
assert not pathlib.Path({canary!r}).exists(), "importing core loads no plugin"
stack_core.registries.rewards["same"]
"""


def write_project(folder, name, source, group="stack.plugins.v1", plugin=None):
    """Writes the source of a distribution with one module, and returns its folder."""
    project, module = folder / name, name.replace("-", "_")
    project.mkdir()
    (project / f"{module}.py").write_text(source)
    text = PYPROJECT.format(name=name, group=group, module=module, plugin=plugin or name)
    (project / "pyproject.toml").write_text(text)
    return project


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_is_reported_once_and_stops_no_other(environment, tmp_path, name):
    source, status, reason = BAD[name]
    before = environment.plugins()
    with environment.installed(write_project(tmp_path, name, source)):
        after = environment.plugins()
    report = after.pop(name)
    assert after == before
    assert (report["version"], report["status"], report["registered"]) == ("1.2", status, {})
    assert len(report["problems"]) == 1
    assert re.search(reason, report["problems"][0])


def canary(path: Path) -> str:
    return f"open({str(path)!r}, 'w').close()\n"


@pytest.fixture(scope="module")
def found(environment, tmp_path_factory):
    """Messages and reports of an environment with all these distributions, and what their imports left.

    The attributes `disabled` and `selected` are the reports if an environment variable leaves plugins out.
    """
    folder = tmp_path_factory.mktemp("projects")
    imported, future = folder / "imported", folder / "future"
    wish = HEADER + "@hookimpl\ndef stack_register_commands(registry): registry.add('sigh', 1)"
    projects = [
        *(write_project(folder, name, source) for name, (source, _, _) in BAD.items()),
        *(write_project(folder, name, source, plugin=plugin) for name, (source, plugin) in TOGETHER.items()),
        write_project(folder, "acme-future", canary(future) + REWARDS + "...", group="stack.plugins.v2"),
        write_project(folder, "acme-present", canary(imported) + REWARDS + "registry.add('present', len)"),
        write_project(folder, "acme-wish", wish),
    ]
    with environment.installed(*projects):
        read = environment.run("-c", READ.format(canary=str(imported)), check=False)
        # Starting up reads the commands: what is wrong with other entries shows when they are asked for.
        help_, listed = environment.stack_each(["--help"], ["plugins", "--json"])
        was_imported = imported.exists()
        imported.unlink(missing_ok=True)
        disabled = environment.plugins(STACK_DISABLE_PLUGINS="acme-present,acme-left,acme-wish")
        selected = environment.plugins(STACK_LOAD_PLUGINS="train")
    return SimpleNamespace(
        read=read,
        help=help_,
        reports=environment.reports_of(listed),
        disabled=disabled,
        selected=selected,
        was_imported=was_imported,
        is_imported_though_blocked=imported.exists(),
        is_future_imported=future.exists(),
    )


def test_all_bad_plugins_at_once_leave_every_command_and_plugin_working(found):
    for name, (_, status, reason) in BAD.items():
        report = found.reports[name]
        assert (report["version"], report["status"], report["registered"]) == ("1.2", status, {})
        (problem,) = report["problems"]
        assert re.search(reason, problem)
    ours = {name: report for name, report in found.reports.items() if name.startswith("stack-")}
    assert len(ours) == 7
    assert {(report["status"], *report["problems"]) for report in ours.values()} == {("loaded",)}
    assert "plugins" in found.help.stdout
    noted = re.findall(r"^stack: plugin '(acme-.*?)' is (?:left out|incomplete): ", found.help.stderr, re.MULTILINE)
    known = [name for name, (source, status, _) in BAD.items() if status == "failed" or "_commands" in source]
    assert sorted(name for name in noted if name in BAD) == sorted(known)


def test_another_abi_major_is_never_imported(found):
    report = found.reports["acme-future"]
    assert (report["status"], report["abi"], report["registered"]) == ("failed", "2", {})
    assert "built for plugin ABI 2, and this core offers ABI 1" in report["problems"][0]
    assert not found.is_future_imported


def test_two_plugins_of_one_name_are_both_refused_and_named(found):
    for name in ("acme-left", "acme-right"):
        report = found.reports[name]
        assert (report["status"], report["registered"], len(report["problems"])) == ("failed", {}, 1)
        assert "'acme-left' and 'acme-right' each name their plugin 'same'" in report["problems"][0]
    left, right = found.disabled["acme-left"], found.disabled["acme-right"]
    assert (left["status"], right["registered"]) == ("blocked", {"rewards": ["right"]})


def test_two_entries_of_one_name_are_both_refused_and_named(found):
    for name in ("first", "second"):
        report = found.reports[f"acme-{name}"]
        assert (report["status"], report["registered"]) == ("incomplete", {"rewards": [name]})
        (problem,) = report["problems"]
        assert "plugins 'first' and 'second' each register it" in problem
    assert "PluginError: rewards 'same' is not available: plugins 'first' and 'second'" in found.read.stderr


def test_a_plugin_that_the_environment_leaves_out_is_not_imported(found):
    present = found.reports["acme-present"]
    assert (present["status"], present["registered"]) == ("loaded", {"rewards": ["present"]})
    assert found.was_imported and not found.is_imported_though_blocked
    for variable, reports in (("STACK_DISABLE_PLUGINS", found.disabled), ("STACK_LOAD_PLUGINS", found.selected)):
        assert reports["acme-present"]["status"] == "blocked"
        assert variable in reports["acme-present"]["problems"][0]
        assert [reports[name]["status"] for name in ("stack-core", "stack-train")] == ["loaded", "loaded"]


def test_a_command_that_cannot_be_called_leaves_the_others(found):
    assert "stack: command 'sigh' of plugin 'acme-wish' is left out" in found.help.stderr
    assert "plugins" in found.help.stdout
