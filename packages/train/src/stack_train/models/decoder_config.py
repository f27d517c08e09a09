"""Size and numerics of a decoder."""

from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.nn.attention import Attention, Rope
from stack_train.nn.context import ContextKeys
from stack_train.nn.linear import FloatName
from stack_train.nn.stack import NamedRemat, RematPolicy

__all__ = ["DecoderConfig"]


@config
class DecoderConfig:
    """Size and numerics of a decoder.

    Attributes:
      name: name of the model family.
      vocab_size: number of tokens in the vocabulary.
      embed: width of the residual stream.
      layers: number of layers.
      heads: number of query heads.
      kv_heads: number of key-value heads, each shared by a group of query heads; None has one per query head.
      head_dim: width of a head; None is embed / heads.
      mlp: hidden width of feed-forward layers.
      max_positions: maximum sequence length in tokens.
      rope_theta: base of the rotary frequencies.
      rope_scaling: scaling of rotary positions for long contexts; None does not scale.
      norm_epsilon: term added to the mean square in RMS norms.
      tie_embeddings: uses the transposed embedding as the head.
      initializer_std: standard deviation of the initial weights.
      dtype: dtype of activations.
      param_dtype: dtype of parameters without an optimizer, in inference and exports; `precision.params` is the dtype
        of trained parameters.
      remat: values of each layer that are saved for the backward pass; the others are recomputed. "none" saves all,
        "dots" matrix products, "dots_no_batch" matrix products except attention's, "full" only the layer's input. Or
        values by name, {save: [query, key, value], offload: [layer_input]}, the offloaded ones in the host's memory;
        a vision tower then saves the inputs of its layers.
      unroll: compiles every layer separately in training instead of a loop, which makes steps faster and compilation
        slower. None does so for up to 32 layers on a single GPU.
      context_keys: exchange between the `mesh.context` devices that share a sequence: "ring" receives one device's keys
        at a time, "gathered" all keys together, "ulysses" some heads of all tokens.
    """

    name: str
    vocab_size: PositiveInt = 32_000
    embed: PositiveInt = 512
    layers: PositiveInt = 8
    heads: PositiveInt = 8
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    mlp: PositiveInt = 2048
    max_positions: PositiveInt = 2048
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: Annotated[ops.RopeScaling, Field(discriminator="rope_type")] | None = None
    norm_epsilon: PositiveFloat = 1e-6
    tie_embeddings: bool = False
    initializer_std: PositiveFloat = 0.02
    dtype: FloatName = "bfloat16"
    param_dtype: FloatName = "float32"
    remat: RematPolicy | NamedRemat = "none"
    unroll: bool | None = None
    context_keys: ContextKeys = "ring"

    def __post_init__(self) -> None:
        self.check_heads()

    def check_heads(self) -> None:
        """Raises a ConfigError if attention does not support these sizes."""
        if self.head_dim is None and self.embed % self.heads:
            raise ConfigError(
                f"embed={self.embed} is not a multiple of heads={self.heads}; set head_dim or change one."
            )
        if self.heads % self.kv_head_count:
            raise ConfigError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; change one of them.")
        if self.head_size % 2:
            raise ConfigError(f"head_dim={self.head_size} is odd; rotary positions turn pairs of features.")

    @property
    def kv_head_count(self) -> int:
        """Number of key-value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.embed // self.heads if self.head_dim is None else self.head_dim

    @property
    def tower_remat(self) -> RematPolicy:
        """Saved values of the layers of a vision tower, which are not saved by name."""
        return self.remat if isinstance(self.remat, str) else "full"

    def attention(self, **fields: Any) -> Attention:
        """Returns attention of this size; `fields` sets or overrides fields of `Attention`."""
        own: dict[str, Any] = {
            "heads": self.heads,
            "kv_heads": self.kv_head_count,
            "head_dim": self.head_size,
            "rope": Rope(theta=self.rope_theta, scaling=self.rope_scaling),
            "context_keys": self.context_keys,
        }
        return Attention(**{**own, **fields})
