"""What stack-serve adds to `stack doctor`."""

from stack_core.abi.plugins import registries
from stack_serve.checks import check_server


def test_a_key_is_reported_and_not_printed() -> None:
    (finding,) = check_server({"STACK_API_KEY": "secret"})
    assert finding.status == "note"
    assert "secret" not in finding.found
    assert not list(check_server({"STACK_API_KEY": ""}))


def test_the_doctor_knows_the_variable() -> None:
    (entry,) = (entry for entry in registries.checks.entries() if entry.name == "server")
    assert entry.details["variables"] == ("STACK_API_KEY",)
    assert registries.checks["server"] is check_server
