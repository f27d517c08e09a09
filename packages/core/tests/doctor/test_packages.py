"""Missing and unfit distributions are found wherever in the tree of dependencies they are."""

import importlib.metadata

import pytest

from stack_core.abi.installing import install_command
from stack_core.abi.plugins import Plugins, Registries
from stack_core.doctor.packages import (
    check_accelerator_packages,
    check_dependencies,
    check_plugins,
    check_python,
    installed,
)

EXTRAS = "Provides-Extra: gpu\nProvides-Extra: other"


@pytest.fixture
def distributions(tmp_path):
    """Builds distributions from {name: (version, [requirements])}."""

    def build(tree, extra=""):
        for name, (version, requirements) in tree.items():
            info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            lines = [f"Requires-Dist: {one}" for one in requirements]
            head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *([extra] if extra else [])]
            (info / "METADATA").write_text("\n".join([*head, *lines]) + "\n")
        found = importlib.metadata.distributions(path=[str(tmp_path)])
        return {distribution.metadata["Name"]: distribution for distribution in found}

    return build


def told(findings):
    return [(finding.check, finding.status) for finding in findings]


def test_this_environment_is_sound():
    assert {"stack-core", "jax", "numpy"} <= installed().keys()
    assert told(check_dependencies(installed(), ["stack-core"])) == [("stack-core", "ok")]


def test_everything_in_range_is_ok(distributions):
    tree = {"stack-core": ("0.1", ["jax>=1,<3", "old; python_version < '3'"]), "jax": ("2.0rc1", [])}
    assert told(check_dependencies(distributions(tree), ["stack-core"])) == [("stack-core", "ok")]


def test_what_is_missing_is_a_problem_with_the_command_that_installs_it(distributions):
    (finding,) = check_dependencies(distributions({"stack-core": ("0.1", ["jax[cpu]>=1,<3"])}), ["stack-core"])
    assert (finding.check, finding.status) == ("jax", "problem")
    assert finding.found == "stack-core 0.1 needs jax[cpu]<3,>=1, which is not installed"
    assert finding.advice == install_command("jax[cpu]<3,>=1")


def test_what_a_stack_package_or_jax_needs_is_serious_and_others_ranges_are_less(distributions):
    tree = {
        "stack-core": ("0.1", ["jax>=1", "rich>=9"]),
        "jax": ("2.0", ["jaxlib==2.0"]),
        "jaxlib": ("1.0", []),
        "rich": ("8", ["markdown>3"]),
        "markdown": ("2", ["gone"]),
    }
    findings = {finding.check: finding for finding in check_dependencies(distributions(tree), ["stack-core"])}
    assert {check: finding.status for check, finding in findings.items()} == {
        "jaxlib": "problem",
        "rich": "problem",
        "markdown": "warning",
        "gone": "problem",
    }
    assert findings["jaxlib"].found == "jax 2.0 needs jaxlib==2.0; 1.0 is installed"
    assert findings["jaxlib"].advice == install_command("jaxlib==2.0")


def test_what_only_an_extra_brings_is_checked_where_it_is_installed(distributions):
    tree = {
        "a": ("1", ["library; extra == 'gpu'", "absent; extra == 'gpu'", "narrow<2; extra == 'other'"]),
        "library": ("0.4", ["compiler>=3.7"]),
        "compiler": ("3.6", []),
        "narrow": ("2", []),
    }
    found = {finding.check: finding for finding in check_dependencies(distributions(tree, EXTRAS), ["a"])}
    assert {check: finding.status for check, finding in found.items()} == {
        "compiler": "warning",
        "narrow": "warning",
        "a": "ok",
    }
    assert found["compiler"].found == "library 0.4 needs compiler>=3.7; 3.6 is installed"


def test_a_circle_of_dependencies_ends(distributions):
    tree = {"a": ("1", ["b"]), "b": ("1", ["a"])}
    assert told(check_dependencies(distributions(tree), ["a", "b"])) == [("a", "ok"), ("b", "ok")]


def test_an_extra_that_is_asked_for_counts_and_others_do_not(distributions):
    tree = {"a": ("1", ["b[fast]"]), "b": ("1", ["c; extra == 'fast'", "d; extra == 'slow'"])}
    assert told(check_dependencies(distributions(tree), ["a"])) == [("c", "problem")]


def test_a_package_that_is_not_installed_is_named(distributions):
    (finding,) = check_dependencies(distributions({}), ["stack-train"])
    assert (finding.status, finding.advice) == ("problem", install_command("stack-train"))


@pytest.mark.parametrize(
    ("version", "status"), [("3.12.1", "ok"), ("3.13.0rc2", "ok"), ("3.10.9", "problem"), ("3.15.0", "problem")]
)
def test_python_has_to_be_one_that_core_supports(distributions, version, status):
    found = distributions({"stack-core": ("0.1", [])}, "Requires-Python: >=3.11,<3.14")
    (finding,) = check_python(found, version)
    assert finding.status == status
    assert version in finding.found


JAX = (
    "0.12.0",
    [
        "jaxlib==0.12.0",
        "libtpu==0.0.50.*; extra == 'tpu'",
        "jax-cuda13-plugin[with-cuda]==0.12.0; extra == 'cuda13'",
        "jax-cuda12-plugin[with-cuda]==0.12.0; extra == 'cuda12'",
    ],
)


def test_accelerator_packages_have_to_be_of_jaxs_release(distributions):
    tree = {
        "jax": JAX,
        "libtpu": ("0.0.50.3", []),
        "jax-cuda13-plugin": ("0.11.2", ["jax-cuda13-pjrt==0.11.2"]),
        "jax-cuda13-pjrt": ("0.12.0", []),
    }
    findings = {finding.check: finding for finding in check_accelerator_packages(distributions(tree))}
    assert findings["libtpu"].status == "ok"
    plugin = findings["jax-cuda13-plugin"]
    assert plugin.status == findings["jax-cuda13-pjrt"].status == "problem"
    assert plugin.found == "version 0.11.2 does not fit jax 0.12.0, which needs jax-cuda13-plugin[with-cuda]==0.12.0"
    assert plugin.advice == install_command("jax[cuda13]==0.12.0", upgrade=True)


def test_without_accelerator_packages_there_is_nothing_to_say(distributions):
    assert list(check_accelerator_packages(distributions({"jax": JAX}))) == []


def test_metadata_that_pip_could_not_read_is_passed_over(distributions):
    assert told(check_dependencies(distributions({"a": ("1", ["b (>=1", "not a requirement"])}), ["a"])) == [
        ("a", "ok")
    ]


def test_plugins_that_are_sound_are_one_line(tmp_path):
    plugins = Plugins([str(tmp_path)], {"STACK_DISABLE_PLUGINS": "nobody"})
    findings = list(check_plugins(plugins, Registries(plugins)))
    assert told(findings) == [("plugins", "ok"), ("plugins", "warning")]
    assert "nobody" in findings[1].found
