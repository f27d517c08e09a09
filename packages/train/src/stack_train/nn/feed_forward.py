"""Feed-forward layers, gated and plain."""

from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import jax
from flax import nnx

from stack_core import ops
from stack_core.abi.errors import ConfigError
from stack_core.abi.mesh import constrain
from stack_core.ops.building import ACTIVATIONS
from stack_train.nn.build import Build
from stack_train.nn.quantized import read_weight
from stack_train.nn.residual import Hidden, Rows
from stack_train.nn.stack import named

__all__ = ["Activation", "Facts", "FeedForward", "Gated", "Plain", "TokenLayer"]

Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared"]
Facts = dict[str, jax.Array]
"""Statistics of a layer's forward pass by name, in addition to its output."""


@runtime_checkable
class TokenLayer(Protocol):
    """Hashable specification of a layer that processes every token independently."""

    def build(self, build: Build) -> Any:
        """Returns a module with the signature (x, rows) -> (output, facts)."""
        ...


@dataclass(frozen=True, kw_only=True)
class Gated:
    """Gated feed-forward layer, y = (f(x G) * (x U)) D.

    Attributes:
      width: hidden width.
      activation: f.
      bias: adds biases to the three products.
      limit: clamps x G from above and x U on both sides; see `ops.gated_linear_unit`. None does not clamp.
    """

    width: int
    activation: Activation = "silu"
    bias: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.bias and self.limit is not None:
            raise ConfigError(f"A gated layer has biases and limit={self.limit}; leave one of them out.")

    def build(self, build: Build) -> "FeedForward":
        return FeedForward(self, build)


class FeedForward(nnx.Module):
    """Module of a `Gated`."""

    def __init__(self, spec: Gated, build: Build) -> None:
        self.spec = spec
        self.gate = build.linear((build.embed, spec.width), ("embed", "mlp"), bias=spec.bias)
        self.up = build.linear((build.embed, spec.width), ("embed", "mlp"), bias=spec.bias)
        self.down = build.linear((spec.width, build.embed), ("mlp", "embed"), bias=spec.bias, residual=True)

    def __call__(self, x: Hidden, rows: Rows) -> tuple[Hidden, Facts]:
        del rows
        activation = self.spec.activation
        if self.gate.bias is None:
            gate, up = (read_weight(linear.kernel, x.dtype) for linear in (self.gate, self.up))
            axes = {"x": ("batch", "seq", "act_embed"), "w_gate": self.gate.axes, "w_up": self.up.axes}
            options: Any = {"activation": activation, "limit": self.spec.limit, "axes": axes}
            gated = named(ops.gated_linear_unit(x, gate, up, **options), "hidden", by_op=True)
        else:  # the op does not support biases
            gated = ACTIVATIONS[activation](named(self.gate(x), "hidden")) * named(self.up(x), "hidden")
        return self.down(constrain(gated, "batch", "seq", "act_mlp", name="gated activations")), {}


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Feed-forward layer without a gate, y = f(x U) D.

    Attributes:
      width: hidden width.
      activation: f.
      bias: adds biases to the two products.
    """

    width: int
    activation: Activation = "gelu"
    bias: bool = True

    def build(self, build: Build) -> "PlainFeedForward":
        return PlainFeedForward(self, build)


class PlainFeedForward(nnx.Module):
    """Module of a `Plain`."""

    def __init__(self, spec: Plain, build: Build) -> None:
        self.spec = spec
        self.up = build.linear((build.embed, spec.width), ("embed", "mlp"), bias=spec.bias)
        self.down = build.linear((spec.width, build.embed), ("mlp", "embed"), bias=spec.bias, residual=True)

    def __call__(self, x: Hidden, rows: Rows) -> tuple[Hidden, Facts]:
        del rows
        wide = ACTIVATIONS[self.spec.activation](named(self.up(x), "hidden"))
        return self.down(constrain(wide, "batch", "seq", "act_mlp", name="activations")), {}
