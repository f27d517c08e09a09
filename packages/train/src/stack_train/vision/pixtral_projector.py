"""Pixtral's projector of patches to tokens of the language model, with or without merging."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from stack_train.models.weight_map import WeightRule
from stack_train.nn.linear import FloatName, Linear
from stack_train.nn.residual import Norm
from stack_train.vision.packed_patches import PATCHES, Patches

__all__ = ["PixtralProjector", "projector_rules"]


class PatchMerger(nnx.Module):
    """Merges squares of patches to one, y = x' M, where x' are the normalized patches of a square, feature by feature.

    Args:
      embed: width of a patch.
      merge: side of a square in patches.
      norm: norm of the patches.
      std, param_dtype, key: see `Linear`.
    """

    def __init__(
        self, embed: int, merge: int, norm: Norm, *, std: float, param_dtype: FloatName, key: jax.Array
    ) -> None:
        self.merge, self.norm_spec = merge, norm
        self.norm = nnx.Param(jax.numpy.ones(embed, param_dtype), logical_axes=("norm",))
        shape = (embed * merge**2, embed)
        self.merger = Linear(shape, (None, "embed"), use_bias=False, std=std, param_dtype=param_dtype, key=key)

    def __call__(self, x: Patches) -> Float[Array, "batch tokens embed"]:
        batch, patches, embed = x.shape
        squares = self.norm_spec(x, self.norm, PATCHES).reshape(batch, -1, self.merge**2, embed)
        return self.merger(squares.swapaxes(2, 3).reshape(batch, patches // self.merge**2, -1))


class PixtralProjector(nnx.Module):
    """y = gelu(merge(x) A + a) B + b; without a merger, tokens are patches.

    Args:
      embed: width of a patch.
      width: width of the decoder.
      merge: side, in patches, of the squares that are merged to one token; None omits the merger and its norm.
      bias: adds a and b.
      norm: norm before the merger.
      std, param_dtype, key: see `Linear`.
    """

    def __init__(
        self,
        embed: int,
        width: int,
        *,
        merge: int | None,
        bias: bool,
        norm: Norm,
        std: float,
        param_dtype: FloatName,
        key: jax.Array,
    ) -> None:
        up_key, down_key, merge_key = jax.random.split(key, 3)
        self.squares = (
            None if merge is None else PatchMerger(embed, merge, norm, std=std, param_dtype=param_dtype, key=merge_key)
        )
        self.up = Linear((embed, width), ("embed", "mlp"), use_bias=bias, std=std, param_dtype=param_dtype, key=up_key)
        self.down = Linear(
            (width, width), ("mlp", "embed"), use_bias=bias, std=std, param_dtype=param_dtype, key=down_key
        )

    def __call__(self, x: Patches) -> Float[Array, "batch tokens width"]:
        x = x if self.squares is None else self.squares(x)
        return self.down(jax.nn.gelu(self.up(x), approximate=False))


def projector_rules(*, merges: bool, bias: bool, parameter: str, tensor: str) -> list[WeightRule]:
    """Returns the locations of a projector's parameters in a Hugging Face checkpoint.

    Args:
      merges: True if the projector has a merger.
      bias: True if it has biases.
      parameter: prefix of the parameters' paths, such as "projector/".
      tensor: prefix of the tensors' names, such as "multi_modal_projector.".
    """
    rules = []
    if merges:
        merger = f"{tensor}patch_merger.merging_layer.weight"
        rules.append(WeightRule(f"{parameter}squares/norm", f"{tensor}norm.weight"))
        rules.append(WeightRule(f"{parameter}squares/merger/kernel", merger, transposed=True))
    for path, name in (("up", "linear_1"), ("down", "linear_2")):
        rules.append(WeightRule(f"{parameter}{path}/kernel", f"{tensor}{name}.weight", transposed=True))
        if bias:
            rules.append(WeightRule(f"{parameter}{path}/bias", f"{tensor}{name}.bias"))
    return rules
