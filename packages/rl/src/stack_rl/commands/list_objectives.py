"""`stack rl list`: lists the algorithms of all objectives with their equations and papers."""

import inspect
import json as json_format
import re
from dataclasses import dataclass
from typing import Annotated, Any

from cyclopts import Parameter

from stack_core.abi.plugins import registries

__all__ = ["Algorithm", "algorithms", "list_objectives"]


@dataclass(frozen=True)
class Algorithm:
    """An objective whose docstring names a source.

    Attributes:
      name: key in the registry `objectives`.
      summary: first paragraph of the docstring.
      equation: equation of the docstring, on one line; empty if it has none.
      source: papers, and departures from them.
      data: fields of `data.name: rollouts` that the paper prescribes; empty for other objectives.
    """

    name: str
    summary: str
    equation: str
    source: str
    data: dict[str, str]


def list_objectives(*, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """List the algorithms of post-training with the loss and the paper of each.

    Args:
      json: print the list as JSON.
    """
    found = algorithms()
    if json:
        print(json_format.dumps([each.__dict__ for each in found], indent=2))
        return
    print("\n\n".join(map(_format, found)))


def algorithms() -> list[Algorithm]:
    """Returns the objectives of all installed packages whose docstrings name a source, sorted by name."""
    each = (_algorithm(name, registries.objectives[name]) for name in sorted(registries.objectives))
    return [algorithm for algorithm in each if algorithm is not None]


def _algorithm(name: str, config_class: Any) -> Algorithm | None:
    text = inspect.cleandoc(config_class.__doc__ or "")
    paragraphs = text.split("\n\n")
    source = next((part for part in paragraphs if part.startswith("Source:")), None)
    if source is None:
        return None
    equation = next((part for part in paragraphs if part.startswith("    ")), "")
    asked = {field: getattr(config_class, field, None) for field in ("advantage", "weights")}
    return Algorithm(
        name=name,
        summary=_one_line(paragraphs[0]),
        equation=_one_line(equation),
        source=_one_line(source.removeprefix("Source:")),
        data={field: value for field, value in asked.items() if isinstance(value, str)},
    )


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _format(each: Algorithm) -> str:
    asked = ", ".join(f"data.{field}: {value}" for field, value in each.data.items())
    lines = [
        f"{each.name}: {each.summary}",
        f"    {each.equation}",
        *([f"    {asked}"] if asked else []),
        f"    {each.source}",
    ]
    return "\n".join(lines)
