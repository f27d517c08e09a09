import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stack_profile
from stack_core.abi.errors import PluginError
from stack_core.abi.plugins import plugins, registries
from stack_core.abi.registry import Registrar


def test_core_loads_and_lists_the_plugin() -> None:
    (report,) = (report for report in plugins.reports() if report.name == "profile")
    assert (report.distribution, report.status, report.problems) == ("stack-profile", "loaded", [])
    for registry in (registries.observers, registries.sections):
        assert registry["profile"] is not None
    assert {"overview", "ops", "roofline", "memory", "compile"} <= set(registries.analyses)


def test_every_analysis_is_a_command_and_no_other_commands_name_can_be_one():
    commands = {name.removeprefix("profile ") for name in registries.commands if name.startswith("profile ")}
    assert {"run", "export"} <= commands - set(registries.analyses)
    assert set(registries.analyses) <= commands
    for name in commands - set(registries.analyses):
        with pytest.raises(PluginError, match="a command of its own"):
            Registrar("analyses", "stranger").add(name, "module:attribute")


def test_the_public_names():
    assert sorted(stack_profile.__all__) == [
        "AnomalyConfig",
        "Capture",
        "CaptureError",
        "CaptureWarning",
        "Continuous",
        "ContinuousConfig",
        "Listener",
        "ProfileError",
        "Trace",
        "TraceError",
        "Watch",
        "capture",
        "listen",
        "load_trace",
    ]
    assert all(hasattr(stack_profile, name) for name in stack_profile.__all__)


def test_it_brings_core_and_less_than_ten_megabytes_of_its_own():
    always = [each for each in importlib.metadata.requires("stack-profile") or () if "extra ==" not in each]
    assert [re.match(r"[\w-]+", each)[0] for each in always] == ["stack-core"]
    files = [path for path in Path(stack_profile.__file__).parent.rglob("*") if path.is_file()]
    assert 50_000 < sum(path.stat().st_size for path in files) < 10_000_000


def test_reading_a_trace_imports_no_jax(captured):
    code = (
        "import sys, stack_profile; from stack_profile.analyses.ops import ops\n"
        f"assert ops(stack_profile.load_trace({str(captured)!r})).rows\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
