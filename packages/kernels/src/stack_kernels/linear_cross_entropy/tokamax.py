"""`linear_cross_entropy` on TPUs: Tokamax's Mosaic-TPU kernels, which hold one tile of the logits at a time.

The kernels neither ignore rows nor check labels. This adapter pads rows to tiles and requests a loss per row. It zeroes
the loss and the gradient of ignored rows, takes the mean over the other rows, and returns NaN for a label outside the
vocabulary. On a mesh each device would compute a mean over all rows, so it runs only if named or measured as fastest.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp

from stack_core.abi.ops import OWN, OpCall, OpImplementation
from stack_core.chips import Chip
from stack_core.ops.building import BackwardCall, as_backward
from stack_kernels import from_tokamax
from stack_kernels.supports import first_problem, is_beyond, takes_no, unquantized

__all__ = ["TOKAMAX", "LogitTile"]

_PLACE = "tokamax._src.ops.linear_softmax_cross_entropy_loss.pallas_mosaic_tpu_kernel"
_DTYPES = ("bfloat16", "float32")
_ROWS, _LANES = 1024, 128
_FEATURES = (512, 384, 256, 128)
_WORDS = (2048, 1024, 512, 256, 128)
_VMEM_BYTES = 48 * 2**20  # of the 64 MiB of the smallest core


@dataclass(frozen=True)
class LogitTile:
    """Rows, features and vocabulary entries of a tile, multiples of 128."""

    rows: int
    embed: int
    vocab: int


def _supports(call: OpCall, chip: Chip, config: Any = None) -> bool | str:
    if (plain := unquantized(call, chip)) is not True:
        return plain
    if (refusal := takes_no(call, "bias", "softcap")) is not True:
        return refusal
    hidden, weight, options = call.arrays["hidden"], call.arrays["weight"], call.options
    absent = from_tokamax.missing()
    problems = {
        f"it takes {' or '.join(_DTYPES)}, not {hidden.dtype.name}": hidden.dtype.name not in _DTYPES,
        "it weighs no squared log-partition and spreads no target": options["z_loss"] != 0
        or options["label_smoothing"] != 0,
        f"embed is a multiple of {_LANES}": weight.shape[0] % _LANES != 0,
        f"the vocabulary has {_LANES} words at least": weight.shape[1] < _LANES,
        f"{config} does not fit the call": is_beyond(config, _space(call, chip)),
        str(absent): absent is not None,
    }
    return first_problem(problems)


def _space(call: OpCall, chip: Chip) -> Iterator[LogitTile]:
    """Yields tiles that fit both passes, which share a config; the largest come first."""
    (embed, vocab), itemsize = call.arrays["weight"].shape[-2:], call.arrays["hidden"].dtype.itemsize
    for features in _FEATURES:
        is_split_in_two = -(-embed // features) == 2  # the backward pass would deadlock
        if embed % features == 0 and not is_split_in_two:
            for words in _WORDS:
                if words < 2 * vocab and _vmem_bytes(features, words, itemsize) <= _VMEM_BYTES:
                    yield LogitTile(_ROWS, features, words)


def _vmem_bytes(features: int, words: int, itemsize: int) -> int:
    """Bytes of VMEM, the larger of the library's estimates for its two kernels."""
    of_features = 1 << (features - 1).bit_length()
    forward = 2 * (_ROWS + words) * of_features * itemsize + 24 * _ROWS + 16 * _ROWS * words
    of_rows, of_words = _ROWS * (2 * itemsize + 16), words * (4 * itemsize + 16)
    backward = of_features * (of_rows + of_words) + 24 * _ROWS + 12 * _ROWS * words + 384 * 2**10
    return max(forward, backward)


class _Rows(NamedTuple):
    """Rows padded to full tiles.

    Attributes:
      hidden: hidden states of the rows.
      labels: labels clipped to the vocabulary.
      counts: True for rows that have a loss.
      is_label: True for labels within the vocabulary.
    """

    hidden: Any
    labels: Any
    counts: Any
    is_label: Any

    @classmethod
    def of(cls, hidden: Any, labels: Any, vocab: int, ignore_index: int, tile: int) -> "_Rows":
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).astype(jnp.int32)
        more = -len(rows) % tile
        targets = jnp.pad(targets, (0, more), constant_values=ignore_index)
        counts = (targets != ignore_index) & (jnp.arange(len(targets)) < len(rows))
        labels = jnp.clip(targets, 0, vocab - 1)
        return cls(jnp.pad(rows, ((0, more), (0, 0))), labels, counts, labels == targets)

    def number(self) -> Any:
        """Returns the number of rows that have a loss, at least 1."""
        return jnp.maximum(jnp.sum(self.counts), 1).astype(jnp.float32)


def _forward(
    *,
    hidden: Any,
    weight: Any,
    labels: Any,
    ignore_index: int,
    reduction: str,
    requested: frozenset[str],
    config: LogitTile,
    **unused: Any,
) -> tuple[Any, Mapping[str, Any]]:
    rows = _Rows.of(hidden, labels, weight.shape[1], ignore_index, config.rows)
    losses, lse = _losses(rows, weight, config)
    losses = jnp.where(rows.counts, jnp.where(rows.is_label, losses, jnp.nan), 0)
    residuals = {OWN: lse} if OWN in requested else {}
    if reduction == "none":
        return losses[: labels.size].reshape(labels.shape), residuals
    total = jnp.sum(losses)
    return (total / rows.number() if reduction == "mean" else total), residuals


@as_backward
def _backward(call: BackwardCall, *, config: LogitTile) -> Mapping[str, Any]:
    """Recomputes the log-partitions if its own forward pass did not run or could not save them."""
    hidden, weight, labels = (call.arrays[name] for name in ("hidden", "weight", "labels"))
    options, cotangents = call.options, call.cotangents
    rows = _Rows.of(hidden, labels, weight.shape[1], options["ignore_index"], config.rows)
    lse = call.residuals[OWN] if OWN in call.residuals else _losses(rows, weight, config)[1]
    if options["reduction"] == "none":
        of_rows = jnp.pad(cotangents.reshape(-1), (0, -labels.size % config.rows))
    else:
        of_row = cotangents / rows.number() if options["reduction"] == "mean" else cotangents
        of_rows = jnp.broadcast_to(of_row, rows.labels.shape)
    of_rows = jnp.where(rows.counts, jnp.where(rows.is_label, of_rows, jnp.nan), 0).astype(jnp.float32)
    library = importlib.import_module(_PLACE)
    gradients = functools.partial(
        library.linear_softmax_cross_entropy_loss_bwd_pallas_mosaic_tpu, **_blocks(config), reduction="none"
    )
    of_hidden, of_weight = from_tokamax.on_arrays(gradients, of_rows, lse, rows.hidden, rows.labels, weight)
    of_hidden = of_hidden[: labels.size].reshape(hidden.shape).astype(hidden.dtype)
    return {"hidden": of_hidden, "weight": of_weight.astype(weight.dtype)}


def _losses(rows: _Rows, weight: Any, config: LogitTile) -> tuple[Any, Any]:
    """Computes the loss and the log-partition of each row."""
    library = importlib.import_module(_PLACE)
    losses = functools.partial(
        library.linear_softmax_cross_entropy_loss_fwd_pallas_mosaic_tpu, **_blocks(config), reduction="none"
    )
    return from_tokamax.on_arrays(losses, rows.hidden, rows.labels, weight)


def _blocks(config: LogitTile) -> dict[str, int]:
    return {"b_block_size": config.rows, "h_block_size": config.embed, "v_block_size": config.vocab}


TOKAMAX = OpImplementation(
    "linear_cross_entropy",
    "tokamax",
    _forward,
    _backward,
    platforms=("tpu",),
    supports=_supports,
    # Core asks for the default before `_supports` can refuse, and `_space` reads the shape of the weight.
    default=lambda call, chip: None if unquantized(call, chip) is not True else next(_space(call, chip), None),
    space=_space,
    residuals=(OWN,),
    is_opaque=True,
    priority=-1,
)
