"""All packages installed side by side."""

import subprocess
import sys
from pathlib import Path

import pytest

from stack_core.abi.hookspecs import REGISTRY_KINDS
from stack_core.abi.plugins import plugins, registries

PACKAGES = ("core", "kernels", "profile", "quant", "rl", "serve", "train")


def test_every_plugin_is_loaded_without_problems() -> None:
    for kind in REGISTRY_KINDS:
        getattr(registries, kind).names()
    found = {report.name: (report.status, report.problems) for report in plugins.reports()}
    assert {name: found[name] for name in PACKAGES} == dict.fromkeys(PACKAGES, ("loaded", []))


@pytest.mark.parametrize("kind", REGISTRY_KINDS)
def test_every_registered_target_exists(kind: str) -> None:
    registry = getattr(registries, kind)
    for name in registry.names():
        assert registry[name] is not None


def test_the_packages_suggested_for_missing_names_are_those_that_register_them() -> None:
    script = Path(__file__).parents[1] / "tools/providers.py"
    checked = subprocess.run([sys.executable, script, "--check"], check=False, stdout=subprocess.PIPE, text=True)
    assert checked.returncode == 0, checked.stdout
