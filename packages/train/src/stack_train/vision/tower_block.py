"""Layers of image and text towers: pre-norm transformer layers with biases and without rotary positions."""

from typing import Any, Final, Literal

import jax
from flax import nnx
from jaxtyping import Array, Float

from stack_core import ops
from stack_core.abi.mesh import LogicalAxes
from stack_train.nn.build import Build
from stack_train.nn.layer_norm import LayerNorm
from stack_train.nn.stack import RematPolicy, scan_layers
from stack_train.vision.packed_patches import PATCHES, join_heads, split_heads

__all__ = ["ATTENTION", "BLOCK_NAMES", "Activation", "TowerBlock", "activate", "run_blocks"]

Places = Float[Array, "batch places embed"]

Activation = Literal["gelu_tanh", "gelu", "quick_gelu"]
"""Activations of towers: GELU with the approximation by tanh, exact GELU, and x sigmoid(1.702 x)."""

_HEADS: Final[LogicalAxes] = ("batch", None, "act_heads", None)
ATTENTION: Final[dict[str, LogicalAxes]] = {"query": _HEADS, "key": _HEADS, "value": _HEADS}
"""Logical axes of the operands of attention: places are not split over devices."""

BLOCK_NAMES: Final = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "up": "mlp.fc1",
    "down": "mlp.fc2",
    "attention_norm": "layer_norm1",
    "feed_forward_norm": "layer_norm2",
}
"""Names of a layer's modules in Hugging Face checkpoints of CLIP and SigLIP."""


def activate(x: jax.Array, activation: Activation) -> jax.Array:
    """Applies an activation."""
    if activation == "quick_gelu":
        return x * jax.nn.sigmoid(1.702 * x)
    return jax.nn.gelu(x, approximate=activation == "gelu_tanh")


class TowerBlock(nnx.Module):
    """h = x + attention(norm(x)); y = h + feed_forward(norm(h)). Parameters are stacked, [layers, ...].

    Args:
      config: a config with `embed`, `mlp` and `heads`.
      build: builder of the parameters.
      activation: activation of the feed-forward layer.
      causal: True hides later places.
    """

    def __init__(self, config: Any, build: Build, *, activation: Activation, causal: bool = False) -> None:
        embed, self.heads, self.activation, self.causal = config.embed, config.heads, activation, causal
        self.query = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.key = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.value = build.linear((embed, embed), ("embed", "heads"), bias=True)
        self.output = build.linear((embed, embed), ("heads", "embed"), bias=True, residual=True)
        self.up = build.linear((embed, config.mlp), ("embed", "mlp"), bias=True)
        self.down = build.linear((config.mlp, embed), ("mlp", "embed"), bias=True, residual=True)
        self.attention_norm, self.feed_forward_norm = (LayerNorm.of_layers(build, PATCHES) for _ in range(2))

    def __call__(self, x: Places) -> Places:
        normed = self.attention_norm(x)
        heads = (split_heads(linear(normed), self.heads) for linear in (self.query, self.key, self.value))
        attended: Any = ops.attention(*heads, causal=self.causal, axes=ATTENTION)
        x = x + self.output(join_heads(attended))
        return x + self.down(activate(self.up(self.feed_forward_norm(x)), self.activation))


def run_blocks(blocks: TowerBlock, x: Places, *, remat: RematPolicy) -> Places:
    """Runs stacked layers.

    Args:
      remat: see `scan_layers`.
    """

    def run(block: TowerBlock, x: Places, _: None, __: None) -> tuple[Places, None]:
        return block(x), None

    x, _ = scan_layers(run, [blocks], x, [None], per_row=None, remat=remat, unroll=False, moves=False)
    return x
