"""The record of a burn-in in its output directory: outcomes survive a kill at any time, and a second run continues."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from stack_core.abi.errors import BenchmarkError
from stack_core.runtime.journal import Journal
from stack_kernels.burn_in.checks import Check, CheckResult

__all__ = ["State"]

_FILE = "burn-in.journal"


class State:
    """Outcomes of the checks and problems of the timed calls; a context manager.

    Args:
      out: output directory.
      identity: chip, versions and ops, which a burn-in in the directory must share.

    Raises:
      BenchmarkError: the directory holds other files, or another burn-in.
    """

    def __init__(self, out: Path, identity: str) -> None:
        path = out / _FILE
        check_output(out)
        self._journal = Journal(path)
        self._journal.append("identity", identity.encode(), key="")
        found = self._journal.read("identity")[0].payload.decode()
        if found != identity:
            self._journal.close()
            raise BenchmarkError(
                f"{str(out)!r} holds a burn-in of {found}, and this is {identity}. Name another directory with --out."
            )

    def __enter__(self) -> "State":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._journal.close()

    def add(self, result: CheckResult) -> None:
        """Records the outcome of a check."""
        fields = {name: value for name, value in dataclasses.asdict(result).items() if name != "check"}
        self._journal.append("check", json.dumps(fields).encode(), key=result.check.key)

    def results(self, planned: Sequence[Check]) -> list[CheckResult]:
        """Returns the recorded outcomes of the planned checks."""
        by_key = {check.key: check for check in planned}
        return [CheckResult(by_key[key], **fields) for key, fields in self._read("check") if key in by_key]

    def add_failure(self, stage: str, name: str, problem: str) -> None:
        """Records why something in a timed stage failed or does not apply; it is not tried again."""
        self._journal.append(stage, json.dumps(problem).encode(), key=name)

    def failures(self, stage: str) -> dict[str, str]:
        """Returns the recorded problems of a stage by name."""
        return dict(self._read(stage))

    def _read(self, kind: str) -> Iterator[tuple[str, Any]]:
        for entry in self._journal.read(kind):
            yield entry.key or "", json.loads(entry.payload)


def check_output(out: Path) -> None:
    """Checks that a burn-in can begin or continue in a directory.

    Raises:
      BenchmarkError: it holds other files.
    """
    if out.is_file():
        raise BenchmarkError(f"{str(out)!r} is a file. Name a directory with --out.")
    if not (out / _FILE).exists() and out.exists() and any(out.iterdir()):
        raise BenchmarkError(f"{str(out)!r} is not empty and holds no burn-in to continue. Name another directory.")
