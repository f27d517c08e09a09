"""`stack doctor`: checks the installation and the machine, and suggests fixes."""

import dataclasses
import json as json_format
import sys
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.text import Text

from stack_core.doctor import STATUSES, Finding, diagnose, worst

__all__ = ["doctor"]

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}
_STATUS_WIDTH = max(map(len, STATUSES)) + 2


def doctor(
    *,
    json: Annotated[bool, Parameter(negative=())] = False,
    timeout_s: Annotated[float, Parameter(validator=Number(gt=0))] = 90.0,
) -> None:
    """Check Python, packages, JAX, plugins, devices, memory and environment variables, and suggest fixes.

    Exits with status 1 if there is a problem; notes and warnings do not count.

    Args:
      json: print machine-readable results.
      timeout_s: maximum seconds for JAX to start.
    """
    findings: list[Finding] = []
    console = Console(soft_wrap=True, highlight=False)
    for finding in diagnose(timeout_s=timeout_s):
        findings.append(finding)
        if not json:
            console.print(_lines(finding))
    if json:
        print(
            json_format.dumps(
                {"status": worst(findings), "findings": list(map(dataclasses.asdict, findings))}, indent=2
            )
        )
    else:
        console.print(_summary(findings))
    if worst(findings) == "problem":
        sys.exit(1)


def _lines(finding: Finding) -> Text:
    indent = "\n" + " " * _STATUS_WIDTH
    text = Text(finding.status.ljust(_STATUS_WIDTH), style=_STYLES[finding.status])
    text.append(f"{finding.check}: ", style="bold not dim")
    text.append(finding.found.replace("\n", f"{indent}  "), style="default")
    if finding.advice:
        text.append(f"{indent}-> {finding.advice}", style="default")
    return text


def _summary(findings: list[Finding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in reversed(STATUSES)}
    parts = [f"{count} {status}{'s' * (count > 1)}" for status, count in counts.items() if count and status != "ok"]
    return f"\n{', '.join(parts)}." if parts else "\nNo problems were found."
