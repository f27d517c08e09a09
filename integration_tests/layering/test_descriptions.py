"""Every field of a config has a line under `Attributes:` in the docstring of its class or of a base class."""

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

SOURCES = sorted(Path(__file__).parents[2].glob("packages/*/src/stack_*"))
# Number of fields without a description by package; to be lowered, never raised.
UNDESCRIBED: dict[str, int] = {}


def test_every_field_of_a_config_is_described(source: Path) -> None:
    found = [f"{each.__qualname__}.{name}" for each in _configs(source) for name in _undescribed(each)]
    assert len(found) == UNDESCRIBED.get(source.name, 0), "\n".join(found)


def _configs(source: Path) -> list[type]:
    names = [path.relative_to(source.parent).with_suffix("").parts for path in source.rglob("*.py")]
    modules = [importlib.import_module(".".join(parts).removesuffix(".__init__")) for parts in sorted(names)]
    classes = [each for module in modules for each in vars(module).values() if inspect.isclass(each)]
    own = {each for each in classes if each.__module__.partition(".")[0] == source.name and _is_config(each)}
    return sorted(own, key=lambda each: each.__qualname__)


def _is_config(cls: type) -> bool:
    return hasattr(cls, "__pydantic_fields__") and dataclasses.is_dataclass(cls)


def _undescribed(config: type) -> list[str]:
    described = {name for base in config.__mro__ for name in _attributes(base)}
    fields: tuple[Any, ...] = dataclasses.fields(config)
    return [field.name for field in fields if field.name not in described]


def _attributes(cls: type) -> set[str]:
    """The names that the docstring's section `Attributes:` describes, "beta_start, beta_end: first and last beta"."""
    _, _, section = inspect.cleandoc(cls.__dict__.get("__doc__") or "").partition("Attributes:\n")
    lines = re.findall(r"^  ([\w, ]+):", section, re.MULTILINE)
    return {name.strip() for line in lines for name in line.split(",")}


def test_a_field_without_a_line_is_found() -> None:
    @dataclasses.dataclass
    class Sizes:
        """Sizes.

        Attributes:
          width, depth: both sizes.
        """

        width: int
        depth: int
        height: int

    assert _undescribed(Sizes) == ["height"]
