"""The residual stream between layers, and how a mesh splits it."""

from dataclasses import dataclass
from typing import Any, Final

import jax
from jaxtyping import Array, Float, Int

from stack_core import ops
from stack_core.abi.mesh import LogicalAxes, constrain

__all__ = ["STREAM", "Hidden", "Norm", "ResidualStream", "Rows", "gather_sequence", "shard_residual"]

Hidden = Float[Array, "batch seq embed"]

STREAM: Final = ("batch", "norm_seq", "act_embed")
"""The logical axes of the residual stream, where only norms and sums act on it."""


@dataclass(frozen=True, kw_only=True)
class Norm:
    """The RMS norm y = (scale + offset) x / sqrt(mean(x^2) + epsilon).

    Attributes:
      offset: what stored scales lack: 1 for families whose scales start at 0.
    """

    epsilon: float = 1e-6
    offset: float = 0.0

    def __call__(
        self, x: Float[Array, "... features"], scale: Any, axes: LogicalAxes | None = None
    ) -> Float[Array, "... features"]:
        """Norms the last axis of `x`, whose logical axes are `axes`."""
        names = None if axes is None else {"x": axes}
        normed: Any = ops.norm(x, scale[...], epsilon=self.epsilon, scale_offset=self.offset, axes=names)
        return normed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """What all layers know of a batch's tokens.

    Attributes:
      positions: [batch, seq], each token's place in its document.
      segment_ids: [batch, seq], 0 for padding, or None: tokens attend within their segment only.
    """

    positions: Int[Array, "batch seq"]
    segment_ids: Int[Array, "batch seq"] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ResidualStream:
    """The residual stream between two layers; the norm that follows forms its last sum in the same pass.

    Attributes:
      x: [batch, seq, embed].
      added: like `x`, what the layer before adds to it; None if the sum is formed.
    """

    x: Any
    added: Any

    def normed(self, norm: Norm, scale: Any) -> tuple[Any, Any]:
        """Returns the RMS norm of the sum, and the sum."""
        if self.added is None:
            return norm(self.x, scale, STREAM), self.x
        options: Any = {"epsilon": norm.epsilon, "scale_offset": norm.offset, "axes": {"x": STREAM}}
        normed, x = ops.norm(self.added, scale[...], residual=self.x, **options)
        return normed, x

    def joined(self) -> "ResidualStream":
        """Forms the sum, which takes half the memory to keep."""
        return self if self.added is None else ResidualStream(self.x + self.added, None)


def shard_residual(x: Hidden) -> Hidden:
    """Splits activations as the residual stream is split, where only norms and sums act on them.

    Where rules split its sequence over `tensor`, the sum of products that `tensor` leaves in parts becomes a
    reduce-scatter. Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022
    (arXiv:2205.05198).
    """
    return constrain(x, *STREAM, name="the residual stream")


def gather_sequence(x: Hidden) -> Hidden:
    """Splits activations as products and attention need them, with the whole sequence on each part of `tensor`."""
    return constrain(x, "batch", "seq", "act_embed", name="normed activations")
