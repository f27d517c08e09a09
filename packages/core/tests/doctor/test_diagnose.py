"""The order of the doctor's checks, and the checks of plugins among them."""

import types

import pytest

from stack_core import doctor
from stack_core.abi.findings import Finding


class Checks(dict):
    def entries(self):
        return ()


def test_a_check_of_a_plugin_replaces_none_of_core_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(environ):
        raise RuntimeError("no such device")

    checks = Checks({"python": lambda environ: [Finding("acme", "ok", "found")], "broken": broken})
    monkeypatch.setattr(doctor, "registries", types.SimpleNamespace(checks=checks))
    monkeypatch.setattr(doctor, "_check_jax", lambda timeout_s, distributions: ())
    found = list(doctor.diagnose())
    assert {"python", "acme", "cores"} <= {each.check for each in found}
    (failed,) = (each for each in found if each.check == "broken")
    assert failed.status == "warning"
    assert "RuntimeError: no such device" in failed.found
