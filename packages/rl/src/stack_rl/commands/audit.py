"""`stack rl audit`: compares a recipe's settings with the paper of its algorithm."""

import json as json_format
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from stack_core.abi.config import Selected, load_yaml, parse, to_mapping
from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_rl.objectives.policy import PolicyConfig

__all__ = ["Choice", "audit", "choices", "warnings"]


@dataclass(frozen=True)
class Choice:
    """One field of a recipe.

    Attributes:
      key: path of the field, such as "objective.kl".
      value: value in the recipe.
      expected: the value of the algorithm's paper.
    """

    key: str
    value: Any
    expected: Any


def audit(file: Path, /, *, json: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Compare a recipe with the algorithm that it names: stack rl audit examples/cell.yaml

    Marks each part of the algorithm that differs from its paper, and lists settings that contradict the paper.

    Args:
      file: the YAML file of a run.
      json: print the choices as JSON.
    """
    recipe = load_yaml(file)
    objective = _selected(recipe, "objective", Selected(registries.objectives))
    if isinstance(objective, PolicyConfig):
        data = _selected(recipe, "data", Selected(registries.data, former="kind"))
        if hasattr(data, "for_objective"):
            data.for_objective(objective)  # raises if the two do not fit together
    found, named = list(choices(objective)), list(warnings(objective))
    if json:
        print(json_format.dumps({"choices": [each.__dict__ for each in found], "warnings": named}, indent=2))
        return
    for each in found:
        differs = "" if each.value == each.expected else f"   <- {objective.name} has {each.expected}"
        print(f"{each.key}: {each.value}{differs}")
    for warning in named:
        print(f"\n{warning}")


def choices(objective: Any) -> Iterator[Choice]:
    """Yields the objective's fields with the values of its paper."""
    expected = to_mapping(parse(type(objective), {"name": objective.name}))
    for field, value in to_mapping(objective).items():
        yield Choice(f"objective.{field}", value, expected[field])


def warnings(objective: Any) -> Iterator[str]:
    """Yields departures from the paper that no single setting shows, for policy gradients."""
    if not isinstance(objective, PolicyConfig):
        return
    is_default = (
        to_mapping(objective)["kl_estimator"]
        == to_mapping(parse(type(objective), {"name": objective.name}))["kl_estimator"]
    )
    if objective.kl_estimator == "k3" and objective.kl and not objective.kl_corrected and not is_default:
        yield (
            "objective.kl_estimator: k3 has the gradient of KL(p_ref || p). kl_corrected: true gives it that of "
            "KL(p || p_ref), and so does k2 on policy."
        )


def _selected(recipe: Mapping[str, Any], section: str, selection: Selected) -> Any:
    mapping, registry = recipe.get(section), selection.registry
    mapping = {"name": mapping} if isinstance(mapping, str) else mapping
    if not isinstance(mapping, Mapping) or "name" not in (mapping := selection.with_key(mapping, section)):
        raise ConfigError(f"The recipe lacks {section}.name, which is one of: {', '.join(registry.names())}.")
    return parse(registry[mapping["name"]], mapping, path=section)
