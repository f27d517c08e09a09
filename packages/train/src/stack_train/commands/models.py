"""`stack models`: the families of models, how large each is as a file, and what of it is tested."""

import inspect
import json as json_format
from pathlib import Path
from typing import Any

from rich.table import Table

from stack_core.abi.plugins import registries
from stack_core.commands.tables import print_table
from stack_train.models.family import DecoderFamily

__all__ = ["models"]


def models(*, json: bool = False) -> None:
    """List model families: what config.json calls them, lines of their file, published sizes, and what is tested.

    Lines are of code and text, without blank ones. Tested of a decoder is that its logits, greedy continuations or
    gradients are transformers', that conversion to Hugging Face and back is bitwise, that engines answer from pages as
    the model does without a cache, and that a step of a published size is compiled.

    Args:
      json: print machine-readable results.
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
    is_decoder = isinstance(family, DecoderFamily)
    return {
        "family": name,
        "architecture": family.config_map.architecture if is_decoder else None,
        "lines": _lines(family.config_class),
        "sizes": list(family.sizes) if is_decoder else [],
        "tested": list(family.tested) if is_decoder else [],
    }


def _lines(of: type) -> int | None:
    """Lines of the file that defines a class; None where there is no such file."""
    try:
        path = inspect.getsourcefile(of)
    except TypeError:
        return None
    if path is None or not Path(path).is_file():
        return None
    return sum(bool(line.strip()) for line in Path(path).read_text(encoding="utf-8").splitlines())
