"""Each plugin loads in its own guard; what fails is reported and stops no other."""

import importlib
import re
import sys
import threading

import pytest

from stack_core.abi.errors import PluginError, UnknownName
from stack_core.abi.plugins import Plugins, Registries

GROUP = "stack.plugins.v1"
HEADER = "from stack_core.abi.hookspecs import hookimpl\nSTACK_ABI_MINOR = 0\n"


class Site:
    """A folder of distributions `dist-<name>` 1.0, each with one plugin whose module is `plugin_<name>`."""

    def __init__(self, folder):
        self.folder = folder
        self.modules = []

    def add(self, name, source, *, group=GROUP, distribution=None, plugin=None):
        distribution = distribution or f"dist-{name}"
        module = f"plugin_{name}"
        (self.folder / f"{module}.py").write_text(source)
        self.modules.append(module)
        self.describe(distribution, f"[{group}]\n{plugin or name} = {module}\n")

    def describe(self, distribution, entry_points, metadata=True):
        info = self.folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
        info.mkdir(exist_ok=True)
        if metadata:
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        with (info / "entry_points.txt").open("a") as file:
            file.write(entry_points)

    def plugins(self, **environ):
        importlib.invalidate_caches()
        return Plugins([str(self.folder)], environ)


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    site = Site(tmp_path)
    site.add("good", value_plugin("good"))
    yield site
    for name in site.modules:
        sys.modules.pop(name, None)


def value_plugin(name):
    return HEADER + f"@hookimpl\ndef stack_register_models(registry): registry.add('{name}', {name!r}.upper)\n"


def models_of(plugins):
    return Registries(plugins).models


def report_of(plugins, name):
    (report,) = (report for report in plugins.reports() if report.name == name)
    return report


def test_a_good_plugin_registers_and_is_reported(site):
    plugins = site.plugins()
    assert models_of(plugins)["good"]() == "GOOD"
    report = report_of(plugins, "good")
    assert (report.distribution, report.version, report.abi) == ("dist-good", "1.0", "1.0")
    assert (report.status, report.problems, report.registered) == ("loaded", [], {"models": ("good",)})


BROKEN = {
    "import_error": ("import no_such_module_anywhere", "ModuleNotFoundError"),
    "syntax_error": ("def broken(:", "SyntaxError"),
    "leaves": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "panics": ("class Panic(BaseException): ...\nraise Panic('rust')", "Panic: rust"),
    "reads_registries": (
        "from stack_core.abi import plugins\nplugins.ACTIVE.reports()",
        "reads the list of plugins too early",
    ),
    "no_minor": ("x = 1", "STACK_ABI_MINOR"),
    "true_minor": ("STACK_ABI_MINOR = True", "STACK_ABI_MINOR"),
    "newer_minor": ("STACK_ABI_MINOR = 99", r"needs plugin ABI 1\.99, and this core offers 1\.\d+; update stack-core"),
    "misspelled": (
        HEADER + "@hookimpl\ndef stack_register_model(registry): pass",
        "unknown hook 'stack_register_model'. Did you mean 'stack_register_models'",
    ),
    "unmarked": (
        HEADER + "def stack_register_models(registry): pass",
        "stack_register_models without @hookimpl",
    ),
    "wrong_argument": (HEADER + "@hookimpl\ndef stack_register_models(registri): pass", "registri"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_reported_once_and_stops_no_other(site, monkeypatch, kind):
    source, reason = BROKEN[kind]
    site.add(kind, source)
    plugins = site.plugins()
    monkeypatch.setattr("stack_core.abi.plugins.ACTIVE", plugins, raising=False)
    assert models_of(plugins).names() == ("good",)
    report = report_of(plugins, kind)
    assert (report.status, report.registered, len(report.problems)) == ("failed", {}, 1)
    assert re.search(reason, report.problems[0])


def test_ctrl_c_while_a_plugin_is_imported_is_not_its_failure(site):
    site.add("slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.plugins().reports()


def test_a_hook_of_a_later_minor_may_be_marked_optional(site):
    site.add("ahead", HEADER + "@hookimpl(optionalhook=True)\ndef stack_register_dreams(registry): pass")
    assert report_of(site.plugins(), "ahead").status == "loaded"


def test_another_abi_major_is_never_imported(site, tmp_path):
    mark = tmp_path / "imported"
    site.add("future", f"open({str(mark)!r}, 'w').close()\nSTACK_ABI_MINOR = 0\n", group="stack.plugins.v2")
    plugins = site.plugins()
    assert models_of(plugins).names() == ("good",)
    report = report_of(plugins, "future")
    assert (report.status, report.abi) == ("failed", "2")
    assert "built for plugin ABI 2, and this core offers ABI 1; install a matching" in report.problems[0]
    assert not mark.exists()


def test_a_distribution_may_serve_several_majors(site):
    site.add("both", value_plugin("both"))
    site.describe("dist-both", "[stack.plugins.v2]\nboth = plugin_both_v2\n")
    plugins = site.plugins()
    assert models_of(plugins).names() == ("both", "good")
    assert report_of(plugins, "both").status == "loaded"


@pytest.mark.parametrize("group", ["stack.plugin.v1", "stack.plugins", "stack.plugins.v1.0"])
def test_a_misspelled_group_is_reported(site, group):
    site.add("lost", value_plugin("lost"), group=group)
    assert "expected 'stack.plugins.v1'" in report_of(site.plugins(), "lost").problems[0]


def test_unreadable_entry_points_are_reported_and_hide_no_other(site):
    site.describe("dist-torn", f"[{GROUP}]\ntorn\n")
    site.describe("dist-binary", "")
    (site.folder / "dist_binary-1.0.dist-info" / "entry_points.txt").write_bytes(b"\xff\xfe")
    plugins = site.plugins()
    assert models_of(plugins).names() == ("good",)
    assert "entry_points.txt cannot be read" in report_of(plugins, "dist-torn").problems[0]


def test_a_distribution_without_metadata_still_loads(site):
    site.describe("dist-bare", f"[{GROUP}]\nbare = plugin_bare\n", metadata=False)
    (site.folder / "plugin_bare.py").write_text(value_plugin("bare"))
    assert models_of(site.plugins()).names() == ("bare", "good")


def test_what_an_upgrade_left_behind_is_no_second_plugin(site):
    whole = site.folder / "dist_good-1.0.dist-info"
    torn = site.folder / "~ist_good-0.9.dist-info"
    torn.mkdir()
    for path in whole.iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    assert [report.name for report in site.plugins().reports()] == ["good"]


def test_a_distribution_that_another_hides_on_the_path_offers_nothing(site, tmp_path):
    newer = tmp_path / "first" / "dist_good-2.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-good\nVersion: 2.0\n")
    assert Plugins([str(newer.parent), str(site.folder)], {}).reports() == ()


@pytest.mark.parametrize("error", ["OSError('boom')", "SystemExit('boom')"])
def test_a_hook_that_raises_costs_only_its_own_names(site, error):
    name = type(eval(error)).__name__
    site.add(
        "raising",
        HEADER
        + f"@hookimpl\ndef stack_register_models(registry):\n    registry.add('x', 1)\n    raise {error}\n"
        + "@hookimpl\ndef stack_register_rewards(registry): registry.add('y', 1)\n",
    )
    plugins = site.plugins()
    assert models_of(plugins).names() == ("good",)
    assert Registries(plugins).rewards.names() == ("y",)
    report = report_of(plugins, "raising")
    assert (report.status, report.registered) == ("incomplete", {"rewards": ("y",)})
    assert report.problems == [f"stack_register_models failed, so its models are left out: {name}: boom"]


def test_hooks_are_called_once_however_many_threads_ask(site):
    site.add("counted", HEADER + "calls = []\n@hookimpl\ndef stack_register_models(registry): calls.append(1)\n")
    plugins = site.plugins()
    barrier = threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (barrier.wait(), models_of(plugins).names())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.modules["plugin_counted"].calls == [1]


def test_a_hook_may_not_read_the_registry_that_it_fills(site, monkeypatch):
    site.add(
        "circular",
        HEADER
        + "from stack_core.abi import plugins\n"
        + "@hookimpl\ndef stack_register_models(registry): plugins.ACTIVE.collect('models')\n",
    )
    plugins = site.plugins()
    monkeypatch.setattr("stack_core.abi.plugins.ACTIVE", plugins, raising=False)
    assert models_of(plugins).names() == ("good",)
    assert "reads the registry of models too early" in report_of(plugins, "circular").problems[0]


def test_two_plugins_that_claim_one_entry_are_both_refused_and_named(site):
    site.add("one", value_plugin("same"))
    site.add("two", value_plugin("same"))
    plugins = site.plugins()
    models = models_of(plugins)
    assert models.names() == ("good",)
    with pytest.raises(PluginError, match="'one' and 'two'"):
        models["same"]
    for name in ("one", "two"):
        report = report_of(plugins, name)
        assert (report.status, report.registered, len(report.problems)) == ("incomplete", {}, 1)
        assert "'one' and 'two'" in report.problems[0]


def test_what_core_registers_is_cores_and_the_other_is_named(site):
    ops = "@hookimpl\ndef stack_register_ops(registry): registry.add({!r}, object())\n"
    define = "@hookimpl\ndef stack_register_op_definitions(registry): registry.add({!r}, object())\n"
    own = HEADER + define.format("norm") + ops.format("norm/reference")
    site.add("own", own, distribution="stack-core", plugin="core")
    site.add("other", HEADER + ops.format("norm/reference") + "")
    site.add("lost", HEADER + ops.format("nrom/fast"))
    site.add("conv", HEADER + define.format("conv") + ops.format("conv/reference"))
    site.add("half", HEADER + define.format("half") + ops.format("half/fast"))
    plugins = site.plugins()
    with pytest.warns(RuntimeWarning, match="Plugin 'other': ops 'norm/reference' refused: it is core's own"):
        entries, refused = plugins.collect("ops")
    providers = {name: entry.provider for name, entry in entries.items()}
    assert providers == {"norm/reference": "core", "conv/reference": "conv", "half/fast": "half"} and not refused
    assert "there is no op 'nrom'. Did you mean 'norm'?" in report_of(plugins, "lost").problems[0]
    assert "'half' has no reference; register 'half/reference'" in report_of(plugins, "half").problems[0]
    assert not report_of(plugins, "conv").problems


def same_name(site):
    for distribution in ("left", "right"):
        site.add(f"of_{distribution}", value_plugin(distribution), distribution=distribution, plugin="same")


def test_two_distributions_that_claim_one_plugin_name_are_both_refused_and_named(site):
    same_name(site)
    plugins = site.plugins()
    assert models_of(plugins).names() == ("good",)
    left, right = (report for report in plugins.reports() if report.name == "same")
    for report in (left, right):
        assert (report.status, report.registered, len(report.problems)) == ("failed", {}, 1)
        assert "'left' and 'right'" in report.problems[0]
    assert "plugin_of_left" not in sys.modules


def test_of_two_plugins_of_one_name_one_can_be_blocked_by_its_distribution(site):
    same_name(site)
    assert models_of(site.plugins(STACK_DISABLE_PLUGINS="left")).names() == ("good", "right")


def test_nobody_else_can_be_core(site):
    site.add("own", value_plugin("own"), distribution="stack-core", plugin="core")
    site.add("impostor", value_plugin("impostor"), plugin="core")
    plugins = site.plugins()
    assert models_of(plugins).names() == ("good", "own")
    assert {report.distribution: report.status for report in plugins.reports() if report.name == "core"} == {
        "stack-core": "loaded",
        "dist-impostor": "failed",
    }


@pytest.mark.parametrize(
    ("variable", "value", "left"),
    [
        ("STACK_DISABLE_PLUGINS", "one", ("core", "good", "two")),
        ("STACK_DISABLE_PLUGINS", "one, dist-two,", ("core", "good")),
        ("STACK_DISABLE_PLUGINS", "core", ("core", "good", "one", "two")),
        ("STACK_LOAD_PLUGINS", "one", ("core", "one")),
        ("STACK_LOAD_PLUGINS", "", ("core", "good", "one", "two")),
    ],
)
def test_plugins_are_blocked_and_selected_by_environment(site, variable, value, left):
    for name in ("core", "one", "two"):
        site.add(name, value_plugin(name), distribution="stack-core" if name == "core" else None)
    plugins = site.plugins(**{variable: value})
    assert models_of(plugins).names() == left
    blocked = {report.name for report in plugins.reports() if report.status == "blocked"}
    assert blocked == {"core", "good", "one", "two"} - set(left)
    assert sys.modules.keys() & {f"plugin_{name}" for name in blocked} == set()


def test_names_that_block_or_select_nothing_are_reported(site):
    site.add("core", value_plugin("core"), distribution="stack-core")
    assert site.plugins(STACK_DISABLE_PLUGINS="good,core").mistakes() == (
        "STACK_DISABLE_PLUGINS names core, which is always loaded.",
    )
    (problem,) = site.plugins(STACK_LOAD_PLUGINS="god").mistakes()
    assert problem == "STACK_LOAD_PLUGINS names 'god', which no installed distribution offers. Did you mean 'good'?"


SELECTING = "@hookimpl\ndef stack_select_op(call, chip, candidates): "


def test_the_first_answer_selects_and_a_selector_that_raises_is_not_asked_again(site):
    site.add("a_silent", HEADER + SELECTING + "return None")
    site.add("b_raising", HEADER + "calls = []\n" + SELECTING + "calls.append(call); raise OSError('boom')")
    site.add("c_choosing", HEADER + SELECTING + "return candidates[0]")
    plugins = site.plugins()
    call = {"call": "linear", "chip": None, "candidates": ("first", "second")}
    with pytest.warns(RuntimeWarning, match="'b_raising': stack_select_op failed.*OSError: boom"):
        assert plugins.select_op(**call) == "first"
    assert plugins.select_op(**call) == "first"
    assert sys.modules["plugin_b_raising"].calls == ["linear"]
    assert report_of(plugins, "b_raising").status == "incomplete"


def test_a_plugin_that_failed_selects_nothing(site):
    site.add("failed", HEADER + "def stack_register_ops(registry): ...\n" + SELECTING + "return 'second'")
    assert site.plugins().select_op(call="linear", chip=None, candidates=("first", "second")) is None


def test_an_unknown_name_says_which_plugins_are_left_out(site):
    site.add("broken", "import no_such_module_anywhere")
    with pytest.raises(UnknownName, match=r"Did you mean 'good'\?.*not fully loaded: 'broken'"):
        models_of(site.plugins())["god"]


def test_installed_core_registers_its_reference_ops():
    from stack_core.abi.plugins import registries

    assert "attention/reference" in registries.ops
    with pytest.raises(AttributeError, match="Did you mean 'models'"):
        _ = registries.model
    with pytest.raises(UnknownName):
        registries.rewards["no_such_reward"]
