"""Dual chunk attention: rotary positions that never exceed the trained distance, in sequences of any length.

Source: An et al., Training-Free Long-Context Scaling of Large Language Models, 2024 (arXiv:2402.17463).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import parts_of
from stack_core.ops.dispatch.contract import accurate_dtype, contract
from stack_core.ops.query_blocks import map_query_blocks

__all__ = ["DualChunk", "attend_dual_chunks"]

_BLOCK_BYTES = 2**26
"""Size of the products of one block of queries, on one device."""


@config
class DualChunk:
    """Positions of dual chunk attention.

    Tokens form chunks of s = chunk - local tokens. The key at position j is rotated to j mod s, and the query at
    position i to one of three positions, by the number of chunks from the key's chunk to its own:

        0           i mod s
        1           min(i mod s + s, chunk)
        2 or more   min(2 s - 1, chunk)

    Distances of up to `local` tokens are exact, and none exceeds `chunk`. Beyond `trained` tokens, the scores of the
    query at position i are multiplied by max(1, 0.1 ln((i + 1) / trained) + 1) ** 2, the temperature of YaRN (Peng et
    al., 2023, arXiv:2309.00071).

    Departure from vLLM: its temperature depends on the length of the prompt, and on the position of generated tokens.
    Here it depends on the position of the query, so a cache gives the results of a complete sequence.

    Attributes:
      chunk: largest distance.
      local: number of tokens before a chunk with exact distances.
      trained: length from which scores are scaled, in tokens; None scales none.
    """

    chunk: PositiveInt
    local: NonNegativeInt
    trained: PositiveInt | None = None

    def __post_init__(self) -> None:
        if 2 * self.local > self.chunk:
            raise ConfigError(
                f"dual_chunk has local={self.local}, more than half of chunk={self.chunk}, but local tokens are in the "
                "chunk before. Change one."
            )

    @property
    def stride(self) -> int:
        """Number of tokens of a chunk."""
        return self.chunk - self.local

    @property
    def plain_tokens(self) -> int:
        """Length of a sequence up to which attention is ordinary attention."""
        return self.stride if self.trained is None else min(self.stride, self.trained)

    def key_positions(self, positions: Int[Array, "*tokens"]) -> Int[Array, "*tokens"]:
        """Returns the rotary positions of keys."""
        return positions % self.stride

    def query_positions(self, positions: Int[Array, "*tokens"]) -> tuple[Int[Array, "*tokens"], ...]:
        """Returns the rotary positions of queries for keys of the same chunk, of the chunk before, and of others."""
        inside = positions % self.stride
        farthest = min(2 * self.stride - 1, self.chunk)
        return inside, jnp.minimum(inside + self.stride, self.chunk), jnp.full_like(positions, farthest)

    def query_scale(self, positions: Int[Array, "*tokens"]) -> Float[Array, "*tokens"] | None:
        """Returns the factor of the scores of queries, or None without one."""
        if self.trained is None:
            return None
        growth = jnp.log((positions + 1).astype(jnp.float32) / self.trained)
        return jnp.maximum(0.1 * growth + 1, 1) ** 2


def attend_dual_chunks(
    queries: Float[Array, "batch q_seq regions heads key_dim"],
    key: Float[Array, "batch kv_seq kv_heads key_dim"],
    value: Float[Array, "batch kv_seq kv_heads value_dim"],
    *,
    places: Int[Array, "batch q_seq"],
    chunks: tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]],
    segments: tuple[Int[Array, "batch q_seq"], Int[Array, "batch kv_seq"]] | None = None,
    scale: float | None = None,
) -> Float[Array, "batch q_seq heads value_dim"]:
    """Computes causal attention of queries whose rotation depends on the distance of chunks.

        o_i = sum_j exp(z_ij) v_j / d_i        d_i = sum_j exp(z_ij)        z_ij = scale q_i^(r) k_j, j <= p_i
        r = min(chunk of i - chunk of j, 2)

    One block of queries is computed at a time, and again in the backward pass. Each block computes the products of all
    three rotations and selects by chunk: its products cost three times as much as ordinary attention's.

    Args:
      queries: q^(r), each query with the rotations of `DualChunk.query_positions`.
      places: p, the index of each query's own key.
      chunks: chunk of each query and key.
      segments: segments of queries and keys; queries attend only to their own segment.
      scale: factor of the scores; None is key_dim ** -0.5.
    """
    batch, _, regions, heads, dim = queries.shape
    kv_seq, kv_heads = key.shape[1:3]
    dtype, scale = accurate_dtype(queries.dtype), dim**-0.5 if scale is None else scale
    keys, values = key.swapaxes(1, 2), value.swapaxes(1, 2)
    by_query: dict[str, Any] = {"queries": queries, "places": places, "chunks": chunks[0]}
    if segments is not None:
        by_query["segments"] = segments[0]

    def of_block(block: dict[str, Any]) -> Any:
        rows = block["places"].shape[1]
        # [batch, kv_heads, regions, group, rows, key_dim]
        split = block["queries"].reshape(batch, rows, regions, kv_heads, -1, dim).transpose(0, 3, 2, 4, 1, 5)
        products = contract("bhqd,bhkd->bhqk", split.reshape(batch, kv_heads, -1, dim), keys, dtype)
        inside, before, others = jnp.moveaxis(products.reshape(*split.shape[:-1], kv_seq), 2, 0)
        distance = (block["chunks"][:, :, None] - chunks[1][:, None])[:, None, None]
        visible = jnp.arange(kv_seq) <= block["places"][..., None]
        if segments is not None:
            visible &= block["segments"][..., None] == segments[1][:, None]
        logits = scale * jnp.where(distance == 0, inside, jnp.where(distance == 1, before, others))
        # Finite, because rows of padding may see no key.
        logits = jnp.where(visible[:, None, None], logits, jnp.finfo(dtype).min)
        weights = jax.nn.softmax(logits, axis=-1).astype(value.dtype).reshape(batch, kv_heads, -1, kv_seq)
        output = contract("bhqk,bhkd->bhqd", weights, values, value.dtype)
        return output.reshape(batch, heads, rows, -1).swapaxes(1, 2)

    shares = parts_of("batch") * parts_of("act_heads")
    max_rows = max(_BLOCK_BYTES * shares // (4 * batch * heads * regions * kv_seq), 1)
    return map_query_blocks(of_block, by_query, max_rows)
