"""`stack profile costs`: the costs of a function, compiled but not run."""

from pathlib import Path

from stack_core.commands.named_function import named_function
from stack_profile.commands.printing import Limit, PrintCsv, PrintJson, check_formats, show
from stack_profile.comparisons.costs import compiled_costs

__all__ = ["costs"]


def costs(
    target: str,
    /,
    *,
    out: Path | None = None,
    compilations: int = 3,
    limit: Limit = 20,
    json: PrintJson = False,
    csv: PrintCsv = False,
) -> None:
    """Compile a function without running it: stack profile costs FILE.py:fn

    Its arguments come from example_args() in the same file and may be jax.ShapeDtypeStructs. FLOPs, memory and
    instructions are shown by Python line; `stack profile gate` compares two sets of costs.

    Args:
      target: the function.
      out: also write the costs to this file, for a later gate.
      compilations: number of compilations; their times show the variation.
    """
    check_formats(json=json, csv=csv)
    fn, arguments = named_function(target)
    found = compiled_costs(fn, *arguments, compilations=compilations)
    if out is not None:
        found.write(out)
    show(found.answer(), limit=limit, json=json, csv=csv)
