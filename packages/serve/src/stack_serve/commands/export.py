"""`stack export`: export of a model as a bundle that is served without the model's code."""

import sys
from pathlib import Path

__all__ = ["export"]

_TOKENS = 128


def export(
    model: str,
    bundle: Path,
    /,
    *,
    licence: str,
    batch: tuple[int, ...] = (1, 8),
    seq: tuple[int, ...] | None = None,
    name: str | None = None,
) -> None:
    """Export a language model's scoring function: stack export RUN|HF_DIR BUNDLE --licence Apache-2.0

    The bundle computes the log-probability of each token of a text. To export other functions, call
    stack_serve.bundle.export from Python.

    Args:
      model: directory of a run or of a Hugging Face checkpoint.
      bundle: directory to create; it must not exist.
      licence: licence of the weights: an SPDX expression, or its text.
      batch: number of texts scored together; may be repeated.
      seq: maximum number of tokens per text; may be repeated (128, or the model's positions if fewer).
      name: model name for clients (the name of the directory; of its parent for a version such as digits/1).
    """
    from stack_core.abi.model_formats import open_for_generation
    from stack_serve.bundle.exporting import export as write
    from stack_serve.bundle.scoring import scoring

    checkpoint = open_for_generation(model)
    if seq is None:
        seq = (min(_TOKENS, checkpoint.max_positions),)
    function = scoring(checkpoint, batch=batch, seq=seq)
    manifest = write(bundle, {"score": function}, checkpoint.load_params(), licence=licence, name=name)
    count = len(manifest.programs)
    print(f"stack: {manifest.name}: {count} program{'s' * (count != 1)} in {bundle}", file=sys.stderr)
