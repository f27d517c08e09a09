import subprocess
import sys

import stack_profile
from stack_core.plugins import plugins, registries


def test_core_loads_and_lists_the_plugin() -> None:
    (report,) = (report for report in plugins.reports() if report.name == "profile")
    assert (report.distribution, report.status, report.problems) == ("stack-profile", "loaded", [])
    for registry in (registries.observers, registries.configs, registries.commands):
        assert registry["profile"] is not None


def test_the_public_names():
    assert sorted(stack_profile.__all__) == [
        "Capture",
        "CaptureError",
        "CaptureWarning",
        "ProfileError",
        "Trace",
        "TraceError",
        "capture",
        "load_trace",
    ]
    assert all(hasattr(stack_profile, name) for name in stack_profile.__all__)


def test_reading_a_trace_imports_no_jax(captured):
    code = (
        "import sys, stack_profile; from stack_profile.analyses.ops import ops\n"
        f"assert ops(stack_profile.load_trace({str(captured)!r})).rows\n"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
