"""The lightning indexer of DeepSeek sparse attention, which selects keys for each query.

Source: DeepSeek-AI, DeepSeek-V3.2, 2025 (arXiv:2512.02556), section 2.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from stack_core.abi.mesh import LogicalAxes
from stack_core.ops.building import accurate_dtype
from stack_core.ops.selection import KeySelection, attend_selected, attend_selected_with_loss, index_loss
from stack_train.nn.attention import Rope
from stack_train.nn.build import Build
from stack_train.nn.context import attend, check_unsplit_sequence
from stack_train.nn.feed_forward import Facts
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.residual import Hidden, Rows

__all__ = ["IndexTraining", "Indexer", "LightningIndexer", "attend_indexed"]

_KEY_NORM_EPSILON = 1e-6  # a constant of transformers, without a key in config.json

IndexTraining = Literal["frozen", "dense", "sparse"]
"""Training of an indexer by the divergence of its scores from attention (DeepSeek-V3.2, section 2.1.1).

frozen: the parameters do not change, as in transformers; dense: attention and loss of all keys; sparse: attention and
loss of the selected keys.
"""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Indexer with queries c Q, keys norm(x K) shared by all heads, and weights x W of the heads; see `index_scores`.

    c is the query latent of the attention layer. Gradients pass neither through the selection nor to the inputs of the
    indexer: its parameters learn from `index_loss` only, and the rest of the model does not. Frozen parameters have the
    metadata `trained=False`. Two departures from DeepSeek's kernels, as in transformers: operands are neither rotated
    by a Hadamard matrix (the products are equal) nor rounded to FP8.

    Attributes:
      heads: number of heads.
      dim: width of a head.
      count: maximum number of keys per query.
      rope: rotary positions of queries and keys.
      training: see `IndexTraining`; acts in calls without a cache.
    """

    heads: int
    dim: int
    count: int
    rope: Rope
    training: IndexTraining = "frozen"

    def build(self, build: Build, query_rank: int) -> "LightningIndexer":
        return LightningIndexer(self, build, query_rank)


class LightningIndexer(nnx.Module):
    """Module of an `Indexer`."""

    def __init__(self, spec: Indexer, build: Build, query_rank: int) -> None:
        self.spec = spec
        # Not split over `tensor`: the scores of all heads are summed.
        self.query = build.linear((query_rank, spec.heads * spec.dim), ("latent", None))
        self.key = build.linear((build.embed, spec.dim), ("embed", None))
        self.weights = build.linear((build.embed, spec.heads), ("embed", None))
        scale, bias = (build.full(spec.dim, "head_dim", value) for value in (1.0, 0.0))
        self.key_norm = LayerNorm(scale, bias, _KEY_NORM_EPSILON, ("batch", "seq", None))
        if spec.training == "frozen":
            for parameter in (self.query.kernel, self.key.kernel, self.weights.kernel, scale, bias):
                parameter.set_metadata(trained=False)

    def __call__(self, x: Hidden, query_latent: Float[Array, "batch seq rank"], rows: Rows) -> KeySelection:
        """Returns the operands by which each token of the call selects keys."""
        spec, shape = self.spec, x.shape[:2]
        x, query_latent = jax.lax.stop_gradient((x, query_latent))
        query = spec.rope(self.query(query_latent).reshape(*shape, spec.heads, spec.dim), rows.positions, None)
        key = spec.rope(self.key_norm(self.key(x))[:, :, None, :], rows.positions, None)[:, :, 0]
        # In fp32, as in transformers: heads with weights of both signs cancel.
        weights = self.weights(x.astype(accurate_dtype(x.dtype))) * (spec.heads * spec.dim) ** -0.5
        return KeySelection(query=query, weights=weights, key=key, count=spec.count)


def attend_indexed(
    query: Float[Array, "batch seq heads key_dim"],
    key: Float[Array, "batch seq heads key_dim"],
    value: Float[Array, "batch seq heads value_dim"],
    selection: KeySelection,
    rows: Rows,
    *,
    training: IndexTraining,
    scale: float,
    axes: Mapping[str, LogicalAxes],
) -> tuple[Float[Array, "batch seq heads value_dim"], Facts]:
    """Computes causal attention of the tokens of complete sequences, to all keys if `training` is dense.

    Returns:
      The output, and the means over tokens of `index_loss` and, if `training` is dense, of `index_share`, the share of
      attention that the selected keys have. None are returned for a frozen indexer.

    Raises:
      ShardingError: several devices share a sequence.
    """
    check_unsplit_sequence("An indexer")
    places = jnp.broadcast_to(jnp.arange(query.shape[1]), query.shape[:2])
    ids = rows.segment_ids
    segments = None if ids is None else (ids, ids)
    options: Any = {"positions": places, "segments": segments, "scale": scale, "axes": axes}
    if training == "frozen":
        return attend_selected(query, key, value, selection, **options), {}
    if training == "sparse":
        output, loss = attend_selected_with_loss(query, key, value, selection, **options)
        by_token = {"index_loss": loss}
    else:
        output = attend(query, key, value, segment_ids=rows.segments, scale=scale, axes=axes)
        loss, share = index_loss(query, key, selection, **options)
        by_token = {"index_loss": loss, "index_share": share}
    counted = jnp.ones(loss.shape, loss.dtype) if ids is None else (ids != 0).astype(loss.dtype)
    tokens = jnp.maximum(jnp.sum(counted), 1)  # a batch of padding has none
    return output, {name: jnp.sum(each * counted) / tokens for name, each in by_token.items()}
