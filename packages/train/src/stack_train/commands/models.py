"""`stack models`: a table of the model families, their sizes and their tested features."""

import inspect
import json as json_format
from pathlib import Path
from typing import Any

from rich.table import Table

from stack_core.abi.plugins import registries
from stack_core.commands.tables import print_table
from stack_train.models.encoder_family import EncoderFamily
from stack_train.models.family import DecoderFamily

__all__ = ["models"]


def models(*, json: bool = False) -> None:
    """List model families: architecture in config.json, lines of code, published sizes, and tested features.

    Lines are the non-blank lines of the family's file. Tests of decoders compare logits, greedy continuations and
    gradients with transformers, check that conversion to Hugging Face and back is bitwise exact and that paged engines
    generate what the model does without a cache, and compile a train step of a published size. Tests of encoders
    compare hidden states and gradients with transformers, and served embeddings with sentence-transformers.

    Args:
      json: print the table as JSON.
    """
    rows = [_record(name, registries.models[name]) for name in registries.models.names()]
    if json:
        print(json_format.dumps(rows, indent=2))
        return
    table = Table("family", "architecture", "lines", "published sizes", "tested")
    for row in rows:
        sizes, tested = (", ".join(row[name]) or "-" for name in ("sizes", "tested"))
        table.add_row(row["family"], row["architecture"] or "-", str(row["lines"] or "-"), sizes, tested)
    print_table(table)


def _record(name: str, family: Any) -> dict[str, Any]:
    is_text = isinstance(family, DecoderFamily | EncoderFamily)
    return {
        "family": name,
        "architecture": family.config_map.architecture if is_text else None,
        "lines": _lines(family.config_class),
        "sizes": list(family.sizes) if is_text else [],
        "tested": list(family.tested) if is_text else [],
    }


def _lines(of: type) -> int | None:
    """Counts the non-blank lines of the file that defines a class; None if the source is not available."""
    try:
        path = inspect.getsourcefile(of)
    except TypeError:
        return None
    if path is None or not Path(path).is_file():
        return None
    return sum(bool(line.strip()) for line in Path(path).read_text(encoding="utf-8").splitlines())
