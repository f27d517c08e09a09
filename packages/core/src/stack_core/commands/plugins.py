"""`stack plugins`: every distribution that offers a plugin, and what became of it."""

import dataclasses
import json as json_format

from rich.console import Console
from rich.table import Table

from stack_core import plugins as loaded
from stack_core.hookspecs import REGISTRY_KINDS

__all__ = ["plugins"]


def plugins(*, json: bool = False) -> None:
    """List plugins: distribution, version, ABI, what each registered, or why it was left out.

    Args:
      json: print machine-readable results.
    """
    for kind in REGISTRY_KINDS:
        getattr(loaded.registries, kind).names()
    reports = loaded.plugins.reports()
    if json:
        print(json_format.dumps([dataclasses.asdict(report) for report in reports], indent=2))
        return
    table = Table("plugin", "distribution", "ABI", "status", "registered")
    for report in reports:
        registered = [f"{kind}: {', '.join(names)}" for kind, names in report.registered.items()]
        table.add_row(
            report.name,
            f"{report.distribution} {report.version}",
            report.abi,
            report.status,
            "\n".join([*registered, *report.problems]) or "nothing",
        )
    Console().print(table)
