"""`stack models new`: the draft of a family's file, and its comparison with transformers."""

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.drafting.source_text import family_source
from stack_train.drafting.structure import recognize
from stack_train.huggingface.hub import on_disk
from stack_train.safetensors_files import read_tensors

__all__ = ["draft_family"]


def draft_family(name: str, address: str, out: Path) -> list[str]:
    """Writes the draft of a family and compares it with transformers, if it is installed.

    Args:
      name: name of the family, a Python identifier.
      address: hf:DIR, a checkpoint of the architecture; a tiny random one is enough.
      out: file to write, which must not exist.

    Returns:
      Lines of a report.

    Raises:
      ConfigError: the name is invalid, or the file exists.
      ConversionError: the checkpoint cannot be read, or does not contain decoder layers.
    """
    if not name.isidentifier() or name != name.lower():
        raise ConfigError(f"{name!r} is not a name of a family. Use lower case letters, digits and _, such as olmo2.")
    if out.exists():
        raise ConfigError(f"{out} exists and is not overwritten. Move it, or set --out.")
    directory = on_disk(Path(address.removeprefix("hf:")))
    try:
        mapping = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ConversionError(f"{directory / 'config.json'} cannot be read: {error}. Give hf:DIR.") from error
    tensors = read_tensors(directory)
    structure = recognize(mapping, {each: tensor.shape for each, tensor in tensors.items()})
    out.write_text(family_source(name, structure, _defaults(structure.model_type)), encoding="utf-8")
    lines = [f"{out}: {structure.architecture}, {structure.layers} layers with the same tensors"]
    lines += [f"not recognized: {each}" for each in structure.unknown]
    lines += [f"unknown key of config.json: {each}={mapping[each]!r}" for each in structure.unknown_keys]
    if structure.unknown:
        return [*lines, "Write these parts, register the family in plugin.py, and compare it with transformers."]
    known = {key: value for key, value in mapping.items() if key not in structure.unknown_keys}
    try:
        lines += _compared(out, known, tensors, directory)
    except ConversionError as error:
        return [*lines, f"the draft does not read this checkpoint: {error}"]
    except ImportError as error:
        return [*lines, f"not compared: {error.name} is not installed. pip install torch transformers"]
    if structure.unknown_keys:
        lines.append("The keys were left out. Read them, or add them to `silent` if no value changes the outputs.")
    return lines


def _defaults(model_type: str) -> dict[str, Any]:
    """Returns the defaults of transformers' config class; empty if it is not installed or lacks the class."""
    try:
        return importlib.import_module("transformers").CONFIG_MAPPING[model_type]().to_dict()
    except (ImportError, KeyError):
        return {}


def _compared(out: Path, mapping: dict[str, Any], tensors: Any, directory: Path) -> list[str]:
    from stack_train.drafting.parity import first_difference, load_draft

    spec = importlib.util.spec_from_file_location(f"draft_{out.stem}", out)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    first, found = first_difference(load_draft(module.FAMILY, mapping, tensors), directory)
    worst = max(difference for _, difference in found)
    if first is None:
        return [f"equal to transformers in all {len(found)} parts; the largest difference is {worst:.1e}"]
    return [f"differs from transformers first in {first[0]}, by {first[1]:.1e}"]
