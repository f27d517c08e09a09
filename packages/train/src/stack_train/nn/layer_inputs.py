"""Per-layer embeddings of tokens, an input of every layer in addition to the residual stream (Gemma 3n and 4)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from stack_core.ops.building import ACTIVATIONS
from stack_train.nn.build import Build
from stack_train.nn.feed_forward import Activation
from stack_train.nn.linear import FloatName, Linear, lookup
from stack_train.nn.quantized import read_weight
from stack_train.nn.residual import Hidden, gather_sequence

__all__ = ["GatedInput", "InputGate", "LayerInputs"]


class LayerInputs(nnx.Module):
    """Computes the inputs of all layers from tokens and their embeddings x.

        p_l = (norm(x P_l / sqrt(embed)) + sqrt(width) E_l[token]) / sqrt(2)

    One table E [vocab, layers width] and one projection P [embed, layers width] hold the parts of all layers.

    Args:
      vocab: number of tokens in the vocabulary.
      layers: number of layers.
      width: features per layer.
      build: builder for sizes, initial values and norms of the decoder.
    """

    def __init__(self, vocab: int, layers: int, width: int, build: Build) -> None:
        self.shape, self.norm_spec, self.factor = (layers, width), build.norm, build.embed**-0.5
        values = build.std * jax.random.normal(build.child().key, (vocab, layers * width), build.param_dtype)
        self.embedding = nnx.Param(values, logical_axes=("vocab", "embed"))
        self.project = Linear(
            (build.embed, layers * width),
            ("embed", None),
            use_bias=False,
            std=build.std,
            param_dtype=build.param_dtype,
            key=build.child().key,
        )
        self.norm = nnx.Param(jnp.full(width, 1 - build.norm.offset, build.param_dtype), logical_axes=("norm",))

    def __call__(
        self, x: Hidden, tokens: Int[Array, "batch seq"], dtype: FloatName
    ) -> Float[Array, "layers batch seq width"]:
        """Returns the inputs of all layers in `dtype`."""
        layers, width = self.shape
        of_token = gather_sequence(lookup(read_weight(self.embedding), tokens, dtype))
        # Rounded to the dtype of the activations, as the scale of the decoder's embedding.
        of_token = of_token * jnp.asarray(width**0.5, of_token.dtype)
        projected = self.project(gather_sequence(x)) * self.factor
        parts = [each.reshape(*tokens.shape, layers, width) for each in (projected, of_token)]
        normed = self.norm_spec(parts[0], self.norm, ("batch", "seq", None, None))
        return jnp.moveaxis((normed + parts[1]) * 2**-0.5, 2, 0)


@dataclass(frozen=True, kw_only=True)
class InputGate:
    """Sublayer that adds the layer's input p to the residual stream, y = (f(x G) * p) D.

    Attributes:
      width: features of p.
      activation: f.
    """

    width: int
    activation: Activation = "gelu_tanh"

    def build(self, build: Build) -> "GatedInput":
        return GatedInput(self, build)


class GatedInput(nnx.Module):
    """Module of an `InputGate`."""

    def __init__(self, spec: InputGate, build: Build) -> None:
        self.spec = spec
        self.gate = build.linear((build.embed, spec.width), ("embed", None))
        self.output = build.linear((spec.width, build.embed), (None, "embed"), residual=True)

    def __call__(self, x: Hidden, inputs: Float[Array, "batch seq width"]) -> Hidden:
        gate: Any = ACTIVATIONS[self.spec.activation](self.gate(x))
        return self.output(gate * inputs)
