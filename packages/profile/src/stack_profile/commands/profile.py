"""Commands of `stack profile` that are not analyses: capture a script, export a trace."""

import json as json_format
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from stack_profile.commands.printing import PrintJson, TracePath
from stack_profile.errors import ProfileError

__all__ = ["export", "run"]

run = App(name="run", help_flags=[], version_flags=[])  # options after the script are the script's, including --help


@run.default
def _run(*tokens: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Capture a script: stack profile run [--out DIR] [-m] script.py arguments ...

    The script needs no changes. `stack profile run --help` lists the options.
    """
    from stack_profile.commands.run_script import run_script

    run_script(tokens)


def export(
    trace: TracePath,
    /,
    *,
    to: Literal["perfetto", "speedscope", "folded", "csv", "dot"],
    output: Path | None = None,
    json: PrintJson = False,
) -> None:
    """Write a trace for Perfetto, speedscope, flame graphs or a spreadsheet.

    Args:
      to: format of the file.
      output: file to write, by default standard output.

    Raises:
      ProfileError: `json` without `output`.
    """
    if json and output is None:
        raise ProfileError(
            "--json describes the file of --output, which is missing: without it the trace itself is printed."
        )
    from stack_profile.exports import EXPORTS, write
    from stack_profile.traces.trace import load_trace

    parts = EXPORTS[to](load_trace(trace))
    if output is None:
        for part in parts:
            if isinstance(part, bytes):
                sys.stdout.buffer.write(part)
            else:
                sys.stdout.write(part)
    else:
        write(parts, output)
    if json and output is not None:
        print(json_format.dumps({"output": str(output), "format": to, "bytes": output.stat().st_size}, indent=2))
