"""Recipes by name: the YAML files beside this one."""

from pathlib import Path

from stack_core.errors import UnknownName, nearest
from stack_quant.rules import Rule, load_recipe

__all__ = ["named_or_read", "recipe_names"]


def recipe_names() -> tuple[str, ...]:
    """The names of all recipes that come with this package."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.yaml")))


def named_or_read(recipe: str) -> tuple[Rule, ...]:
    """The rules of a recipe: a name, or the path of a YAML file.

    Raises:
      UnknownName: it is neither; names the nearest and all.
      ConfigError, RuleError: as `load_recipe`.
    """
    path = Path(recipe)
    if path.suffix in (".yaml", ".yml"):
        return load_recipe(path)
    known = recipe_names()
    if recipe not in known:
        raise UnknownName(
            f"Unknown recipe {recipe!r}.{nearest(recipe, known)} Recipes: {', '.join(known)}; or give the path of a "
            "file that ends in .yaml."
        )
    return load_recipe(Path(__file__).with_name(f"{recipe}.yaml"))
