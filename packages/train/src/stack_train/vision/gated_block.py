"""Layers of towers that are built like a Llama's: RMS norms and a gated unit."""

from typing import Any

from flax import nnx

from stack_core import ops
from stack_core.ops.building import ACTIVATIONS
from stack_train.nn.build import Build
from stack_train.nn.feed_forward import Activation
from stack_train.nn.quantized import read_weight
from stack_train.vision.grids import PatchPlaces
from stack_train.vision.packed_patches import PATCHES, Patches, attend_patches

__all__ = ["GatedBlock"]


class GatedBlock(nnx.Module):
    """h = x + attention(norm(x)); y = h + (f(norm(h) G) * (norm(h) U)) D. Parameters are stacked, [layers, ...].

    Args:
      build: builder of the parameters, with the norm.
      heads: number of attention heads.
      mlp: hidden width of the gated unit.
      activation: f.
      bias: adds biases to all products.
    """

    def __init__(self, build: Build, *, heads: int, mlp: int, activation: Activation, bias: bool) -> None:
        embed = build.embed
        self.heads, self.activation, self.norm = heads, activation, build.norm
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=bias)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=bias)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=bias)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=bias, residual=True)
        self.gate = build.linear((embed, mlp), ("embed", "mlp"), bias=bias)
        self.up = build.linear((embed, mlp), ("embed", "mlp"), bias=bias)
        self.down = build.linear((mlp, embed), ("mlp", "embed"), bias=bias, residual=True)
        self.attention_norm, self.feed_forward_norm = build.scale(embed), build.scale(embed)

    def __call__(self, x: Patches, places: PatchPlaces, frequencies: Any) -> Patches:
        """Returns y; `places` and `frequencies` are arguments of `attend_patches`."""
        normed = self.norm(x, self.attention_norm, PATCHES)
        projected = (linear(normed) for linear in (self.query, self.key, self.value))
        attended = attend_patches(*projected, places=places, heads=self.heads, frequencies=frequencies)
        x = x + self.output(attended)
        normed = self.norm(x, self.feed_forward_norm, PATCHES)
        return x + self.down(self._gated(normed))

    def _gated(self, x: Patches) -> Any:
        if self.gate.bias is not None:  # the op does not support biases
            return ACTIVATIONS[self.activation](self.gate(x)) * self.up(x)
        gate, up = (read_weight(linear.kernel, x.dtype) for linear in (self.gate, self.up))
        axes: Any = {"x": PATCHES, "w_gate": self.gate.axes, "w_up": self.up.axes}
        return ops.gated_linear_unit(x, gate, up, activation=self.activation, axes=axes)
