"""What stack-kernels adds to `stack doctor`."""

import importlib.metadata
import re

import pytest

from stack_core.abi.plugins import registries
from stack_core.doctor.accelerators import Hardware
from stack_kernels import checks
from stack_kernels.checks import check_kernels


@pytest.mark.parametrize(
    ("environ", "status", "found"),
    [
        ({"STACK_CPU_KERNELS": "xla"}, "note", "does not use its machine code"),
        ({"STACK_CPU_KERNELS": "off"}, "warning", "'off', which is not known"),
        ({"STACK_TUNED_TABLES": ""}, "note", "uses no tuned tables"),
        ({"STACK_TUNED_TABLES": "/"}, "note", "uses only these tuned tables"),
        ({"STACK_TUNED_TABLES": "/:/absent/a.json"}, "warning", "names /absent/a.json, which does not exist"),
    ],
)
def test_variables_are_explained(environ: dict[str, str], status: str, found: str) -> None:
    (finding,) = (each for each in check_kernels(environ) if each.check in environ)
    assert finding.status == status
    assert found in finding.found


def test_a_gpu_without_tokamax_is_reported_with_the_line_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    monkeypatch.setattr(checks, "find_hardware", lambda: Hardware(nvidia_driver=True))
    (finding,) = check_kernels({})
    assert (finding.check, finding.status) == ("tokamax", "warning")
    # By name, from a source tree, or from a folder of wheels.
    assert re.search(r"(stack-kernels|packages/kernels|stack_kernels\S*\.whl)\[gpu\]", finding.advice)


@pytest.mark.parametrize(("version", "status"), [("0.0.17", "ok"), ("0.0.18", "warning"), (None, None)])
def test_another_version_of_tokamax_is_a_warning(
    version: str | None, status: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert [each.status for each in check_kernels({})] == [status] * (status is not None)


def test_the_doctor_knows_the_variables() -> None:
    (entry,) = (entry for entry in registries.checks.entries() if entry.name == "kernels")
    assert entry.details["variables"] == ("STACK_CPU_KERNELS", "STACK_TUNED_TABLES")
    assert registries.checks["kernels"] is check_kernels
