"""The check that stack-rl adds to `stack doctor`: whether untrusted programs can be run in a sandbox here."""

from collections.abc import Iterator, Mapping

from stack_core.abi.errors import SandboxError
from stack_core.abi.findings import Finding
from stack_rl.rewards.sandbox import Sandbox

__all__ = ["check_sandbox"]


def check_sandbox(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Reports the isolation level that the rewards `code` and `math` get."""
    try:
        sandbox = Sandbox()
    except SandboxError as error:
        found = f"the rewards `code` and `math` cannot run programs. {error}"
        yield Finding(
            "sandbox", "warning", found, "Only runs with these rewards, or with tools in a sandbox, need one."
        )
        return
    yield Finding("sandbox", "ok", f"programs of the policy run at level {sandbox.level!r}")
