"""`stack export`: a model as a bundle, which is served without the code that made it."""

import sys
from pathlib import Path

__all__ = ["export"]


def export(
    model: str,
    bundle: Path,
    /,
    *,
    licence: str,
    batch: tuple[int, ...] = (1, 8),
    seq: tuple[int, ...] = (128,),
    name: str | None = None,
) -> None:
    """Export a language model's scoring function: stack export RUN|HF_DIR BUNDLE --licence Apache-2.0

    The bundle computes the log-probability of each token of a text. Functions of your own are exported from Python, by
    stack_serve.bundle.export.

    Args:
      model: directory of a run or of a Hugging Face checkpoint.
      bundle: directory to make; nothing is overwritten.
      licence: of the weights: an SPDX expression, or its text.
      batch: texts that are scored together; may be given several times.
      seq: tokens of the longest text; may be given several times.
      name: what clients call the model (the directory's name).
    """
    from stack_core.abi.model_formats import open_for_generation
    from stack_serve.bundle.exporting import export as write
    from stack_serve.bundle.scoring import scoring

    checkpoint = open_for_generation(model)
    function = scoring(checkpoint, batch=batch, seq=seq)
    manifest = write(bundle, {"score": function}, checkpoint.load_params(), licence=licence, name=name)
    count = len(manifest.programs)
    print(f"stack: {manifest.name}: {count} program{'s' * (count != 1)} in {bundle}", file=sys.stderr)
