"""Recipes: rules in YAML files. The files in this directory are available by name.

A rule of a recipe may have a key `with_stream`: its algorithm if there are batches for calibration.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stack_core.abi.config import config, load_yaml, parse
from stack_core.abi.errors import ConfigError, UnknownName, nearest
from stack_quant.errors import RuleError
from stack_quant.rules import Rule

__all__ = ["Recipe", "Rules", "as_rules", "load_recipe", "recipe_names"]

Rules = Rule | str | Path | Mapping[str, Any] | Sequence[Rule | Mapping[str, Any]]
"""One rule or several, as `Rule`s or mappings of their fields; or the name or path of a recipe."""


@config
class Recipe:
    """The contents of a recipe file.

    Attributes:
      rules: list of mappings with the fields of `Rule`, in order of precedence.
    """

    rules: tuple[Rule, ...]


def recipe_names() -> tuple[str, ...]:
    """Returns the names of the recipes in this package."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.yaml")))


def load_recipe(recipe: str | Path, *, with_stream: bool = False) -> tuple[Rule, ...]:
    """Loads the rules of a recipe: a name, such as "w4a8", or the path of a YAML file.

    Args:
      with_stream: give rules the algorithms that the recipe has for models with a calibration stream.

    Raises:
      UnknownName: the recipe does not exist; the message suggests the nearest name and lists all names.
      ConfigError: the file is not a mapping with a list `rules`, or a rule has an unknown key.
      RuleError: a rule contradicts itself.
    """
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        return _read(path, with_stream)
    known = recipe_names()
    if str(recipe) not in known:
        raise UnknownName(
            f"Unknown recipe {str(recipe)!r}.{nearest(str(recipe), known)} Recipes: {', '.join(known)}; or give the "
            "path of a file that ends in .yaml."
        )
    return _read(Path(__file__).with_name(f"{recipe}.yaml"), with_stream)


def as_rules(rules: Any, *, with_stream: bool = False, path: str = "rules") -> tuple[Rule, ...]:
    """Parses rules in any of the forms of `Rules`. For `with_stream` see `load_recipe`.

    Args:
      path: path of the rules in a config, for error messages.

    Raises:
      RuleError: `rules` has none of these forms, or a rule contradicts itself.
      ConfigError, UnknownName: as `load_recipe`.
    """
    if isinstance(rules, str | Path):
        return load_recipe(rules, with_stream=with_stream)
    if isinstance(rules, Mapping):
        return as_rules(rules["rules"], path=path) if rules.keys() == {"rules"} else (_rule(rules, f"{path}.0"),)
    if isinstance(rules, Rule):
        return (rules,)
    if not isinstance(rules, Sequence):
        raise RuleError(
            f"{path} is {rules!r}, neither a rule nor a list of rules. Give Rule(path='.*', weights='int8'), a list of "
            f"rules, or the name of a recipe: {', '.join(recipe_names())}."
        )
    return tuple(_rule(rule, f"{path}.{place}") for place, rule in enumerate(rules))


def _read(path: Path, with_stream: bool) -> tuple[Rule, ...]:
    try:
        mapping = load_yaml(path)
    except ConfigError as error:
        raise ConfigError(f"{error} A recipe is a YAML file: `rules:`, then a list of mappings.") from error
    listed = mapping.get("rules")
    if isinstance(listed, list):
        listed = [_with_algorithm(rule, with_stream) if isinstance(rule, Mapping) else rule for rule in listed]
    return parse(
        Recipe, {**mapping, "rules": as_rules(listed, path=f"{path}: rules")} if isinstance(listed, list) else mapping
    ).rules


def _with_algorithm(rule: Mapping[str, Any], with_stream: bool) -> dict[str, Any]:
    fields = {name: value for name, value in rule.items() if name != "with_stream"}
    if with_stream and "with_stream" in rule:
        fields.setdefault("algorithm", rule["with_stream"])
    return fields


def _rule(rule: Any, path: str) -> Rule:
    if isinstance(rule, Rule):
        return rule
    try:
        return parse(Rule, rule, path=path)
    except RuleError as error:
        raise RuleError(f"{path}: {error}") from None
