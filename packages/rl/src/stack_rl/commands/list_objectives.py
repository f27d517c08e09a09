"""`stack rl list`: lists the algorithms of all objectives with their equations and papers."""

import dataclasses
import inspect
import json as json_format
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from cyclopts import Parameter

from stack_core.abi.config import to_mapping
from stack_core.abi.plugins import registries
from stack_rl.objectives.policy import PolicyConfig

__all__ = ["Algorithm", "algorithms", "list_objectives"]


_PARTS: Final = (
    "advantage",
    "loss_aggregation",
    "kl",
    "kl_in",
    "kl_estimator",
    "refill_rounds",
    "overlong",
    "epochs",
    "minibatches",
)


@dataclass(frozen=True)
class Algorithm:
    """An objective whose docstring names a source.

    Attributes:
      name: key in the registry `objectives`.
      summary: first paragraph of the docstring.
      equation: equation of the docstring, on one line; empty if it has none.
      source: papers, and departures from them.
      parts: the algorithm's advantage, aggregation, KL divergence and updates per batch; empty for other objectives.
    """

    name: str
    summary: str
    equation: str
    source: str
    parts: dict[str, Any]


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
    return Algorithm(
        name=name,
        summary=_one_line(paragraphs[0]),
        equation=_one_line(equation),
        source=_one_line(source.removeprefix("Source:")),
        parts=_parts(config_class),
    )


def _parts(config_class: Any) -> dict[str, Any]:
    """Returns the active parts by which an algorithm differs from others."""
    if not issubclass(config_class, PolicyConfig):
        return {}
    values = {field.name: field.default for field in dataclasses.fields(config_class) if field.name in _PARTS}
    shown = {name: to_mapping(value) for name, value in values.items() if value not in (0, None)}
    return shown if values["kl"] else {name: value for name, value in shown.items() if not name.startswith("kl")}


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _format(each: Algorithm) -> str:
    asked = ", ".join(f"{field}: {value}" for field, value in each.parts.items())
    lines = [
        f"{each.name}: {each.summary}",
        f"    {each.equation}",
        *([f"    {asked}"] if asked else []),
        f"    {each.source}",
    ]
    return "\n".join(lines)
