"""The contract suite of `linear_cross_entropy`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from stack_core.testing.cases import OpCase, OpSuite, Quantized, dense, in_tiles, spoiled

__all__ = ["SUITE"]


def _cross_entropy_case(
    name: str,
    rows: tuple[int, ...] = (2, 7),
    embed: int = 12,
    vocab: int = 37,
    ignored: float = 0.0,
    bias: bool = False,
    **options: Any,
) -> OpCase:
    ignore_index = options.get("ignore_index", -100)

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        labels = rng.integers(0, vocab, size=rows).astype(np.int32)
        return {
            "hidden": rng.normal(size=(*rows, embed)),
            "weight": rng.normal(size=(embed, vocab)) / 2,
            "labels": np.where(rng.random(rows) < ignored, np.int32(ignore_index), labels),
            **({"bias": rng.normal(size=vocab)} if bias else {}),
        }

    return OpCase("linear_cross_entropy", name, arrays, options)


def _quantized_case(name: str, scales: tuple[int, int]) -> OpCase:
    plain = _cross_entropy_case(name, ignored=0.3)

    def arrays(rng: np.random.Generator) -> Mapping[str, Any]:
        values = rng.integers(-100, 101, size=(12, 37)).astype(np.int8)
        weight = Quantized(values, rng.uniform(0.005, 0.01, size=scales).astype(np.float32))
        return {**plain.arrays(rng), "weight": weight}

    return OpCase(plain.op, name, arrays, plain.options, fixed=("weight",))


_CASES = (
    _cross_entropy_case("plain"),
    _cross_entropy_case("sum", reduction="sum"),
    _cross_entropy_case("none", reduction="none", ignored=0.3),
    _cross_entropy_case("ignored", ignored=0.5),
    _cross_entropy_case("all_ignored", ignored=1.1),
    _cross_entropy_case("all_ignored_none", ignored=1.1, reduction="none"),
    _cross_entropy_case("other_ignore_index", ignored=0.5, ignore_index=3),
    _cross_entropy_case("odd_sizes", rows=(131,), embed=19, vocab=1000),
    _cross_entropy_case("whole_tiles", rows=(3, 11), embed=32, vocab=96, ignored=0.2),
    _cross_entropy_case("everything_in_whole_tiles", (33,), 64, 1024, 0.2, z_loss=0.01, label_smoothing=0.2),
    _cross_entropy_case("large_vocabulary", rows=(3,), embed=8, vocab=50257, ignored=0.3),
    _cross_entropy_case("empty_rows", rows=(0,)),
    _cross_entropy_case("z_loss", z_loss=0.1, ignored=0.2),
    _cross_entropy_case("label_smoothing", label_smoothing=0.1, ignored=0.2),
    _cross_entropy_case("bias", ignored=0.2, bias=True),
    _cross_entropy_case("softcap", ignored=0.2, softcap=1.5),
    _quantized_case("quantized_by_word", (1, 37)),
    _quantized_case("quantized_by_tile", (4, 1)),
    _cross_entropy_case("everything", z_loss=0.01, label_smoothing=0.2, ignored=0.3, reduction="none"),
    _cross_entropy_case(
        "everything_that_heads_have", z_loss=0.01, label_smoothing=0.2, ignored=0.3, bias=True, softcap=2.0
    ),
    spoiled(_cross_entropy_case("", reduction="none"), "not_a_number", hidden=((0, 2, 3), np.nan)),
    spoiled(_cross_entropy_case(""), "not_a_number_in_the_weight", weight=((3, 5), np.nan)),
)


def _tiled(name: str, rows: tuple[int, ...] = (64,), embed: int = 128, vocab: int = 512, **rest: Any) -> OpCase:
    return _cross_entropy_case(name, rows, embed, vocab, **rest)


_FOR_ACCELERATORS = in_tiles(
    _tiled("full"),
    _tiled("sum", reduction="sum"),
    _tiled("none", reduction="none", ignored=0.3),
    _tiled("ignored", ignored=0.5),
    _tiled("all_ignored", ignored=1.1),
    _tiled("other_ignore_index", ignored=0.5, ignore_index=3),
    _tiled("partial_rows", (2, 67), ignored=0.2),
    _tiled("partial_words", vocab=1000),
    _tiled("wide", (33,), 384, 256),
    _tiled("softcap", softcap=1.5),
    _tiled("bias", bias=True),
    _tiled("z_loss", z_loss=0.01, label_smoothing=0.1),
)


def _oracle(
    hidden: Any,
    weight: Any,
    labels: Any,
    *,
    bias: Any = None,
    softcap: float | None = None,
    reduction: str = "mean",
    **options: Any,
) -> Any:
    logits = hidden @ dense(weight)
    if bias is not None:
        logits = logits + bias
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    losses, counted = _row_losses(logits, labels, **options)
    if reduction == "none":
        return losses
    return jnp.sum(losses) / (max(counted.sum(), 1) if reduction == "mean" else 1)


def _row_losses(
    logits: Any, labels: Any, *, ignore_index: int = -100, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[Any, np.ndarray]:
    """Returns the loss of each row, and a mask of the rows that count."""
    vocab = logits.shape[-1]
    log_partition = jnp.log(jnp.sum(jnp.exp(logits), axis=-1))
    target = (1 - label_smoothing) * (np.asarray(labels)[..., None] == np.arange(vocab)) + label_smoothing / vocab
    losses = log_partition - jnp.sum(target * logits, axis=-1) + z_loss * log_partition**2
    counted = np.asarray(labels) != ignore_index
    return jnp.where(counted, losses, 0.0), counted


SUITE = OpSuite(_CASES, _oracle, _FOR_ACCELERATORS)
