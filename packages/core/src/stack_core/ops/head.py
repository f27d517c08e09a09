"""Output head of a language model: logits, or the cross-entropy without materializing all logits."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from stack_core.ops.definitions.linear import linear
from stack_core.ops.definitions.linear_cross_entropy import linear_cross_entropy

__all__ = ["Head"]

_FEW_ROWS = 64


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "bias", "table"], meta_fields=["scale", "softcap"])
@dataclass(frozen=True)
class Head:
    """Output head of a language model: logits = cap(scale * h W + b), with cap(x) = softcap * tanh(x / softcap).

    Attributes:
      weight: W, [embed, vocab].
      bias: b, [vocab], or None.
      table: the transposed weight, [vocab, embed], if it is stored so and not split over devices. The logits of a few
        rows are then products of its rows: transposing it on a CPU takes longer than the product.
      scale: factor applied to the hidden states before the product.
      softcap: bound on the magnitude of the logits; None disables the cap.
    """

    weight: Any
    bias: Any = None
    scale: float = 1.0
    softcap: float | None = None
    table: Any = None

    def logits(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Computes float32 logits[..., vocab]."""
        hidden, rows = self._scaled(hidden), math.prod(hidden.shape[:-1])
        if self.table is not None and rows <= _FEW_ROWS:
            flat = hidden.reshape(rows, hidden.shape[-1])
            logits = linear(self.table, flat.T, preferred_dtype=jnp.float32).T
            logits = logits.reshape(*hidden.shape[:-1], logits.shape[-1])
        else:
            axes = {"x": (*_rows(hidden), "act_embed"), "weight": ("act_embed", "act_vocab")}
            logits = linear(hidden, self.weight, preferred_dtype=jnp.float32, axes=axes)
        if self.bias is not None:
            logits = logits + self.bias.astype(jnp.float32)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def cross_entropy(
        self, hidden: Float[Array, "*batch embed"], labels: Int[Array, "*batch"], **options: Any
    ) -> Float[Array, "..."]:
        """Computes the loss with `linear_cross_entropy`, which forms the logits in chunks.

        Args:
          options: further arguments of `linear_cross_entropy`, such as `reduction`.
        """
        # Unused options are omitted because an implementation may not accept `bias` or `softcap`.
        own = {"bias": self.bias, "softcap": self.softcap}
        used: dict[str, Any] = {name: value for name, value in own.items() if value is not None}
        if options.get("reduction") == "none":  # For "mean" and "sum", each device would compute all rows.
            used["axes"] = {"hidden": (*_rows(hidden), "act_embed"), "labels": _rows(hidden)}
        with jax.named_scope("cross_entropy"):  # layer name in profiles
            loss: Any = linear_cross_entropy(self._scaled(hidden), self.weight, labels, **used, **options)
        return loss

    def _scaled(self, hidden: jax.Array) -> jax.Array:
        return hidden if self.scale == 1.0 else hidden * jnp.asarray(self.scale, hidden.dtype)


def _rows(hidden: jax.Array) -> tuple[str | None, ...]:
    """Returns the logical names of all axes except the last."""
    return ("batch", "seq", *[None] * hidden.ndim)[: hidden.ndim - 1]
