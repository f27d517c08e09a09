"""`stack plugins`: all distributions that offer a plugin, and the state of each plugin."""

import dataclasses
import json as json_format
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Annotated

from cyclopts import Parameter

from stack_core.abi import plugins as loaded
from stack_core.abi.hookspecs import REGISTRY_KINDS
from stack_core.abi.ops import ABI_MAJOR, ABI_MINOR

__all__ = ["plugins"]


def plugins(*, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List plugins with distribution, version, ABI, and registered names or the reason for leaving one out.

    Args:
      json: print machine-readable results.
    """
    for kind in REGISTRY_KINDS:
        getattr(loaded.registries, kind).names()
    reports, problems = loaded.plugins.reports(), loaded.plugins.mistakes()
    abi = f"{ABI_MAJOR}.{ABI_MINOR}"
    if json:
        listing = [dataclasses.asdict(report) for report in reports]
        print(json_format.dumps({"abi": abi, "problems": problems, "plugins": listing}, indent=2))
        return
    print(f"This core offers plugin ABI {abi}.")
    for line in (*problems, *_lines(reports)):
        print(_wrapped(line))


def _lines(reports: tuple[loaded.PluginReport, ...]) -> Iterator[str]:
    for report in reports:
        yield f"{report.name}: {report.distribution} {report.version}, ABI {report.abi}, {report.status}"
        yield from (f"    {kind}: {', '.join(names)}" for kind, names in report.registered.items())
        yield from (f"    ! {' '.join(problem.split())}" for problem in report.problems)


def _wrapped(line: str) -> str:
    """Wraps the line to the terminal's width; elsewhere keeps one line, which is easier to search."""
    if not sys.stdout.isatty():
        return line
    return textwrap.fill(line, shutil.get_terminal_size().columns, subsequent_indent=" " * 6, break_on_hyphens=False)
