"""What stack-rl adds to `stack doctor`."""

import pytest

from stack_core.abi.errors import SandboxError
from stack_rl import checks


def test_the_level_of_the_sandbox_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = checks.check_sandbox({})
    assert (finding.check, finding.status) in (("sandbox", "ok"), ("sandbox", "warning"))

    def refuse() -> None:
        raise SandboxError("No sandbox level works on this machine")

    monkeypatch.setattr(checks, "Sandbox", refuse)
    (finding,) = checks.check_sandbox({})
    assert finding.status == "warning"
    assert "No sandbox level works" in finding.found
