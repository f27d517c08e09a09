"""`stack models`: a table of the model families, their sizes and their tested features."""

import inspect
import json as json_format
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from rich.table import Table

from stack_core.abi.errors import ConfigError
from stack_core.abi.plugins import registries
from stack_core.commands.tables import print_table
from stack_train.contrastive.family import DualEncoderFamily
from stack_train.drafting.new_family import draft_family
from stack_train.models.encoder_decoder_family import EncoderDecoderFamily
from stack_train.models.encoder_family import EncoderFamily
from stack_train.models.family import DecoderFamily

__all__ = ["models"]


def models(
    action: Literal["new"] | None = None,
    name: str | None = None,
    /,
    *,
    source: Annotated[str | None, Parameter(name="--from")] = None,
    out: Path | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """List model families: architecture in config.json, lines of code, published sizes, and tested features.

    `stack models new NAME --from hf:DIR` writes the first draft of a decoder's file from config.json and the names and
    shapes of its tensors, and compares it with transformers, if that is installed. It prints the tensors and keys that
    it does not recognize, and the first part of the model whose outputs differ.

    Lines are the non-blank lines of the family's file. Tests of decoders compare logits, greedy continuations and
    gradients with transformers. They check that conversion to Hugging Face and back is bitwise exact and that paged
    engines generate the same tokens as the model without a cache, and they compile a train step of a published size.
    Tests of encoders compare hidden states and gradients with transformers, and served embeddings with
    sentence-transformers. Tests of encoder-decoders compare logits, greedy targets, gradients and conversion, and
    tests of image-text models features, losses, gradients and conversion.

    Args:
      action: new: draft a family.
      name: name of the family to draft.
      source: checkpoint of its architecture, hf:DIR; a tiny random one is enough.
      out: file of the draft (NAME.py).
      json: print the table as JSON.
    """
    if action == "new":
        if name is None or source is None or json:
            raise ConfigError("Name the family and a checkpoint: stack models new NAME --from hf:DIR [--out FILE].")
        print("\n".join(draft_family(name, source, Path(f"{name}.py") if out is None else out)))
        return
    if source is not None or out is not None:
        raise ConfigError("--from and --out are for drafts: stack models new NAME --from hf:DIR [--out FILE].")
    rows = [_record(each, registries.models[each]) for each in registries.models.names()]
    if json:
        print(json_format.dumps(rows, indent=2))
        return
    table = Table("family", "architecture", "lines", "published sizes", "tested")
    for row in rows:
        sizes, tested = (", ".join(row[name]) or "-" for name in ("sizes", "tested"))
        table.add_row(row["family"], row["architecture"] or "-", str(row["lines"] or "-"), sizes, tested)
    print_table(table)


def _record(name: str, family: Any) -> dict[str, Any]:
    is_listed = isinstance(family, DecoderFamily | EncoderFamily | EncoderDecoderFamily | DualEncoderFamily)
    return {
        "family": name,
        "architecture": family.config_map.architecture if is_listed else None,
        "lines": _lines(family.config_class),
        "sizes": list(family.sizes) if is_listed else [],
        "tested": list(family.tested) if is_listed else [],
    }


def _lines(of: type) -> int | None:
    """Returns the number of non-blank lines in a class's file, or None for a class without source."""
    try:
        path = inspect.getsourcefile(of)
    except TypeError:
        return None
    if path is None or not Path(path).is_file():
        return None
    return sum(bool(line.strip()) for line in Path(path).read_text(encoding="utf-8").splitlines())
