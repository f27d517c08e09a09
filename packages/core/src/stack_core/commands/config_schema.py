"""`stack config schema`: a JSON schema of config files, which editors use to complete and check them."""

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pydantic

from stack_core.abi.config import Sections, Selected, mark_of, to_mapping
from stack_core.abi.errors import ConfigError
from stack_core.commands.config_keys import (
    attribute_texts,
    default_of,
    entry_class,
    nested_classes,
    options_of,
    reads_config,
    registered_classes,
)

__all__ = ["json_schema", "schema"]


def schema(*, command: str = "train", out: Path | None = None) -> None:
    """Print a JSON schema of config files: stack config schema --out run.schema.json

    With the YAML extension of an editor, `# yaml-language-server: $schema=run.schema.json` as the first line of a
    config file completes its keys, shows their texts and marks mistakes.

    Args:
      command: command that reads the config file.
      out: file to write; standard output by default.
    """
    text = json.dumps(json_schema(reads_config(command)[0]), indent=1, default=str) + "\n"
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The schema cannot be written: {error}. Choose another --out.") from error
    print(f"{out}: put `# yaml-language-server: $schema={out}` into the first line of a config file.")


def json_schema(cls: type) -> dict[str, Any]:
    """Builds the JSON schema (draft 2020-12) of a config class with all registered classes of its selected fields."""
    definitions: dict[str, Any] = {}
    root = _reference(cls, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _reference(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """Adds the definition of a class, unless it exists, and returns a reference."""
    name = f"{cls.__module__}.{cls.__qualname__}"
    if name not in definitions:
        definitions[name] = {}  # before its fields, which may contain the class itself
        definitions[name] = _object(cls, definitions)
    return {"$ref": f"#/$defs/{name}"}


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, texts = typing.get_type_hints(cls, include_extras=True), attribute_texts(cls)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if sections := mark_of(hint, Sections):
            properties |= {
                name: _reference(kind, definitions) for name, kind, _ in registered_classes(sections.registry)
            }
            continue
        default, is_required = default_of(field)
        shape = _field(hint, definitions)
        if text := texts.get(field.name):
            shape["description"] = text
        # A selected section may come from elsewhere, as `model` from the run that a run starts from.
        if is_required and not mark_of(hint, Selected):
            required.append(field.name)
        elif not is_required and not dataclasses.is_dataclass(default):
            shape["default"] = to_mapping(default)
        properties[field.name] = shape
        if (selected := mark_of(hint, Selected)) and selected.former:
            former = dataclasses.replace(selected, key=selected.former, former="")
            shape["anyOf"] += _selected(former, definitions)["anyOf"][1:]
    return {"type": "object", "properties": properties, "additionalProperties": False, "required": required}


def _field(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if selected := mark_of(hint, Selected):
        return _selected(selected, definitions)
    if nested := nested_classes(hint):
        options = [_reference(each, definitions) for each in nested]
        return {"anyOf": [*options, *(_plain(each) for each in options_of(hint) if each not in nested)]}
    if (entry := entry_class(hint)) is not None:
        return {"anyOf": [{"type": "array", "items": _reference(entry, definitions)}, {}]}
    return _plain(hint)


def _selected(selected: Selected, definitions: dict[str, Any]) -> dict[str, Any]:
    """Builds the choice between the names of a registry and, for each name, the keys of its class."""
    found = list(registered_classes(selected.registry))
    options: list[Any] = [{"type": "string", "enum": [name for name, _, _ in found]}]
    for name, kind, _ in found:
        keys = _object(kind, definitions)
        own = {**keys["properties"], selected.key: {"const": name}}
        required = [key for key in keys["required"] if key != selected.key]
        options.append({**keys, "title": name, "properties": own, "required": required})
    return {"anyOf": options}


def _plain(hint: Any) -> dict[str, Any]:
    """Returns pydantic's schema of a type; the empty schema, which accepts everything, if it has none."""
    try:
        found: Mapping[str, Any] = pydantic.TypeAdapter(hint).json_schema()
    except (
        pydantic.PydanticSchemaGenerationError,
        pydantic.PydanticUserError,
        pydantic.errors.PydanticInvalidForJsonSchema,
    ):
        return {}
    # Its references would refer to definitions that the full schema lacks.
    return {} if "$defs" in found else dict(found)
