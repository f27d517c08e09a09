"""Compression of consecutive tokens to one entry for attention, and the selection of entries for each query.

Source: DeepSeek-AI, DeepSeek-V4, 2026, section 2.3, as in transformers' `DeepseekV4HCACompressor`,
`DeepseekV4CSACompressor` and `DeepseekV4Indexer`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from stack_core.ops.building import accurate_dtype
from stack_train.nn.attention import Rope
from stack_train.nn.build import Build
from stack_train.nn.residual import Hidden, Rows
from stack_train.nn.short_convolution import segment_starts

__all__ = [
    "Compressor",
    "EntryCompressor",
    "EntryIndexer",
    "EntrySelector",
    "Windows",
    "cached_windows",
    "complete_windows",
    "rotate_trailing",
]


class Windows(NamedTuple):
    """Windows of consecutive tokens of a document, each of which is compressed to one entry.

    Attributes:
      last: index of the last token of each window in its row.
      starts: position of the first token of each window in its document.
      is_first: mask of the first windows of their documents.
      complete: mask of the windows that exist; others are padding.
    """

    last: Int[Array, "batch entries"]
    starts: Int[Array, "batch entries"]
    is_first: Bool[Array, "batch entries"]
    complete: Bool[Array, "batch entries"]


def complete_windows(rows: Rows, rate: int) -> Windows:
    """Returns the windows of `rate` tokens in complete rows, counted from the first token of each segment."""
    seq = rows.positions.shape[1]
    places = jnp.broadcast_to(jnp.arange(seq), rows.positions.shape)
    first = segment_starts(rows.segment_ids)
    counts = places if first is None else places - lax.cummax(jnp.where(first, places, 0), axis=1)
    ends = counts % rate == rate - 1
    # A stable sort puts the last tokens of windows first, in their order.
    last = jnp.argsort(~ends, axis=1, stable=True)[:, : seq // rate]
    complete, starts, count = (jnp.take_along_axis(each, last, axis=1) for each in (ends, rows.positions, counts))
    return Windows(last, starts - (rate - 1), count < rate, complete)


def cached_windows(
    first: Int[Array, " batch"], counts: Int[Array, " batch"], seq: int, *, tail: int, rate: int
) -> Windows:
    """Returns the windows of `rate` tokens that the tokens of one call complete.

    Args:
      first: position of the first token of the call.
      counts: number of real tokens of the call.
      seq: number of tokens of the call, including padding.
      tail: number of earlier tokens in front of the tokens of the call, which the indices count, too.
      rate: tokens per window.
    """
    numbers = (first // rate)[:, None] + jnp.arange(-(-seq // rate))
    past = (numbers + 1) * rate - first[:, None]
    return Windows(tail + past - 1, numbers * rate, numbers == 0, past <= counts[:, None])


def rotate_trailing(
    rope: Rope, x: Float[Array, "batch seq heads head_dim"], positions: Int[Array, "batch seq"], heads: str | None
) -> Float[Array, "batch seq heads head_dim"]:
    """Rotates the last `rope.rotary_dim` features of each head; `heads` is the logical name of the head axis."""
    assert rope.rotary_dim is not None
    still, turning = jnp.split(x, [x.shape[-1] - rope.rotary_dim], axis=-1)
    return jnp.concatenate([still, rope(turning, positions, heads)], axis=-1)


@dataclass(frozen=True, kw_only=True)
class Compressor:
    """Compression of each `rate` tokens to one entry, e_w = rope(norm(sum_j softmax_j(z_j + p_j) * v_j)).

    j runs over the tokens of window w, v = x V and z = x G have `dim` features, the softmax applies to each feature,
    and p is a learned bias of each place in the window. With `overlaps`, v, z and p have two series of `dim` features:
    e_w sums the first series over window w - 1, if there is one, and the second series over window w. The entry is
    rotated as the window's first token.

    Attributes:
      rate: number of tokens per entry, at least 2.
      dim: width of an entry.
      rope: rotary positions of the last features of an entry; see `rotate_trailing`.
      overlaps: reads the tokens of two windows.
    """

    rate: int
    dim: int
    rope: Rope
    overlaps: bool = False

    @property
    def width(self) -> int:
        """Number of features of v."""
        return self.dim * (1 + self.overlaps)

    @property
    def tail(self) -> int:
        """Maximum number of earlier tokens that an entry reads in addition to its last token."""
        return self.rate * (1 + self.overlaps) - 1

    def build(self, build: Build, *, trained: bool = True) -> "EntryCompressor":
        return EntryCompressor(self, build, trained)


class EntryCompressor(nnx.Module):
    """Module of a `Compressor`."""

    def __init__(self, spec: Compressor, build: Build, trained: bool) -> None:
        self.spec, self.norm_spec = spec, build.norm
        self.value = build.linear((build.embed, spec.width), ("embed", None))
        self.gate = build.linear((build.embed, spec.width), ("embed", None))
        zeros = jnp.zeros((build.repeats, spec.rate, spec.width), jnp.float32)
        self.bias = nnx.Param(zeros, logical_axes=("layers", None, None))
        self.norm = build.scale(spec.dim, "head_dim")
        if not trained:
            for variable in (self.value.kernel, self.gate.kernel, self.bias, self.norm):
                variable.set_metadata(trained=False)

    def project(self, x: Hidden) -> Float[Array, "batch seq features"]:
        """Returns [v, z] of each token."""
        return jnp.concatenate([self.value(x), self.gate(x)], axis=-1)

    def pool(
        self, features: Float[Array, "batch tokens features"], windows: Windows
    ) -> Float[Array, "batch entries dim"]:
        """Returns the entries of windows; entries of incomplete windows are meaningless, but finite.

        Args:
          features: [v, z] of tokens.
          windows: windows of these tokens.
        """
        spec, bias = self.spec, self.bias[...]
        if windows.last.shape[1] == 0:  # rows shorter than a window
            return jnp.zeros((len(features), 0, spec.dim), features.dtype)
        dtype = accurate_dtype(features.dtype)
        value, logits = self._of_window(features, windows.last, dtype)
        logits = logits + bias.astype(dtype)
        if spec.overlaps:
            earlier, earlier_logits = self._of_window(features, windows.last - spec.rate, dtype)
            earlier_logits = earlier_logits + bias.astype(dtype)
            earlier_logits = jnp.where(windows.is_first[:, :, None, None], -jnp.inf, earlier_logits)
            value = jnp.concatenate([earlier[..., : spec.dim], value[..., spec.dim :]], axis=2)
            logits = jnp.concatenate([earlier_logits[..., : spec.dim], logits[..., spec.dim :]], axis=2)
        pooled = jnp.sum(jax.nn.softmax(logits, axis=2) * value, axis=2).astype(features.dtype)
        normed = self.norm_spec(pooled, self.norm, ("batch", None, None))
        return rotate_trailing(spec.rope, normed[:, :, None], windows.starts, None)[:, :, 0]

    def _of_window(self, features: jax.Array, last: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns v and z of the tokens of each window, [batch, entries, rate, width]."""
        rate, (batch, entries) = self.spec.rate, last.shape
        places = last[..., None] + jnp.arange(1 - rate, 1)
        found = jnp.take_along_axis(features, places.reshape(batch, -1, 1), axis=1, mode="clip")
        value, logits = jnp.split(found.reshape(batch, entries, rate, -1).astype(dtype), 2, axis=-1)
        return value, logits


@dataclass(frozen=True, kw_only=True)
class EntryIndexer:
    """Indexer of entries, with queries c Q, weights x W of the heads, and keys from a second compressor.

    See `index_scores`.

    c is the query latent of the attention layer. Like the parameters of `Indexer`, which lists the departures from
    DeepSeek's kernels, all parameters have the metadata `trained=False`.

    Attributes:
      heads: number of heads.
      count: maximum number of entries per query.
      compressor: compression of tokens to the keys of the indexer.
    """

    heads: int
    count: int
    compressor: Compressor

    def build(self, build: Build, query_rank: int) -> "EntrySelector":
        return EntrySelector(self, build, query_rank)


class EntrySelector(nnx.Module):
    """Module of an `EntryIndexer`."""

    def __init__(self, spec: EntryIndexer, build: Build, query_rank: int) -> None:
        self.spec = spec
        # Not split over `tensor`: the scores of all heads are summed.
        self.query = build.linear((query_rank, spec.heads * spec.compressor.dim), ("latent", None))
        self.weights = build.linear((build.embed, spec.heads), ("embed", None))
        self.compressor = spec.compressor.build(build.child(), trained=False)
        for layer in (self.query, self.weights):
            layer.kernel.set_metadata(trained=False)

    def __call__(
        self, x: Hidden, query_latent: Float[Array, "batch seq rank"], rows: Rows
    ) -> tuple[Float[Array, "batch seq heads dim"], Float[Array, "batch seq heads"]]:
        """Returns queries and weights of each token."""
        heads, compressor = self.spec.heads, self.spec.compressor
        query = self.query(query_latent).reshape(*x.shape[:2], heads, compressor.dim)
        # In fp32, as in transformers: heads with weights of both signs cancel.
        weights = self.weights(x.astype(accurate_dtype(x.dtype))) * (heads * compressor.dim) ** -0.5
        return rotate_trailing(compressor.rope, query, rows.positions, None), weights
