"""Bamba: Mamba-2 in most layers, and attention with rotary positions in half of each head's features in the others.

Outputs match transformers' `BambaForCausalLM`.

Source: Ganti et al., Bamba: Inference-Efficient Hybrid Mamba2 Model, 2024.
"""

import math
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, ConversionError
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.models.weight_map import Names
from stack_train.nn.attention import Rope
from stack_train.nn.feed_forward import Gated
from stack_train.nn.mamba import Mamba2
from stack_train.nn.residual import Norm

__all__ = [
    "FAMILY",
    "HYBRID_SETTINGS",
    "MAMBA_NAMES",
    "BambaConfig",
    "HybridConfig",
    "Mamba2Config",
    "check_step_limit",
    "read_mamba",
    "write_mamba",
]

_ROTARY_SHARE = 0.5


@config
class Mamba2Config(DecoderConfig):
    """Settings of a decoder with layers of Mamba-2; inherits the fields of `DecoderConfig`.

    Attributes:
      mamba_heads: number of heads of Mamba-2.
      mamba_head_dim: width of a head of Mamba-2.
      mamba_groups: number of groups of heads that share b and c.
      mamba_state: width of b and c.
      mamba_kernel: size of the causal convolution in tokens.
      mamba_bias: adds biases to the projections of Mamba-2.
      mamba_kernel_bias: adds a bias to the causal convolution.
    """

    mamba_heads: PositiveInt = 16
    mamba_head_dim: PositiveInt = 64
    mamba_groups: PositiveInt = 1
    mamba_state: PositiveInt = 128
    mamba_kernel: PositiveInt = 4
    mamba_bias: bool = False
    mamba_kernel_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mamba_heads % self.mamba_groups:
            raise ConfigError(
                f"mamba_heads={self.mamba_heads} is not a multiple of mamba_groups={self.mamba_groups}; change one."
            )

    @property
    def mamba(self) -> Mamba2:
        """Mamba-2 of this size."""
        return Mamba2(
            heads=self.mamba_heads,
            head_dim=self.mamba_head_dim,
            groups=self.mamba_groups,
            state_dim=self.mamba_state,
            kernel=self.mamba_kernel,
            bias=self.mamba_bias,
            kernel_bias=self.mamba_kernel_bias,
        )


@config
class HybridConfig(Mamba2Config):
    """Settings of a decoder with Mamba-2 in most layers; inherits the fields of `Mamba2Config`.

    Attributes:
      attention_layers: indices of the layers with attention, from 0.
      attention_bias: adds biases to the projections of attention.
    """

    attention_layers: tuple[NonNegativeInt, ...] = ()
    attention_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.attention_layers, default=0) >= self.layers:
            raise ConfigError(f"attention_layers={self.attention_layers}: expected indices below layers={self.layers}.")


@config
class BambaConfig(HybridConfig):
    """Size and numerics of a Bamba; inherits the fields of `HybridConfig`.

    Attributes:
      name: selects this family.
      mlp_bias: adds biases to the projections of feed-forward layers.
    """

    name: Literal["bamba"] = "bamba"
    mlp_bias: bool = False


def spec(config: BambaConfig) -> DecoderSpec:
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, rotary_dim=int(config.head_size * _ROTARY_SHARE))
    attention = config.attention(rope=rope, bias=config.attention_bias, output_bias=config.attention_bias)
    feed_forward = Gated(width=config.mlp, bias=config.mlp_bias)
    kinds = (attention if layer in config.attention_layers else config.mamba for layer in range(config.layers))
    layers = tuple(Layer(attention=kind, feed_forward=feed_forward) for kind in kinds)
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon))


def check_step_limit(reader: Reader) -> None:
    """Reads `time_step_limit`, which must not limit the steps of Mamba-2."""
    limit = reader.get("time_step_limit")
    # transformers 5 writes infinity as {"__float__": "Infinity"}.
    if limit not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        reader.problems.append(f"time_step_limit={limit!r}, not [0.0, Infinity]")


def read_mamba(reader: Reader) -> dict[str, Any]:
    """Reads the width of Mamba-2's heads, and that steps are not limited."""
    check_step_limit(reader)
    inner = reader.get("mamba_expand", default=2) * reader.get("hidden_size", default=4096)
    heads, width = reader.get("mamba_n_heads", default=128), reader.get("mamba_d_head", default="auto")
    width = inner // heads if width == "auto" else width
    if width * heads != inner:
        reader.problems.append(f"mamba_d_head={width}, not mamba_expand * hidden_size / mamba_n_heads")
    return {"mamba_head_dim": width}


def write_mamba(config: HybridConfig) -> dict[str, Any]:
    """Returns the keys read by `read_mamba`.

    Raises:
      ConversionError: the width of all heads is not a multiple of `embed`, which transformers requires.
    """
    inner = config.mamba_heads * config.mamba_head_dim
    if inner % config.embed:
        raise ConversionError(
            f"mamba_heads={config.mamba_heads} times mamba_head_dim={config.mamba_head_dim} is not a multiple of "
            f"embed={config.embed}, and a config.json stores the quotient. Change one of them."
        )
    return {"mamba_expand": inner // config.embed, "mamba_d_head": config.mamba_head_dim}


def _read(reader: Reader) -> dict[str, Any]:
    nested = reader.get("rope_parameters", "rope_scaling") or {}
    share = nested.get("partial_rotary_factor") or reader.get("partial_rotary_factor") or _ROTARY_SHARE
    if share != _ROTARY_SHARE:
        reader.problems.append(f"partial_rotary_factor={share}, not {_ROTARY_SHARE}")
    rope = read_rope(reader, handled=("partial_rotary_factor",))
    return {**rope, **read_mamba(reader), "attention_layers": tuple(reader.get("attn_layer_indices") or ())}


def _write(config: BambaConfig) -> dict[str, Any]:
    return {**write_rope(config), **write_mamba(config), "attn_layer_indices": list(config.attention_layers)}


HYBRID_SETTINGS = (
    Setting("attention_bias", ("attention_bias",), False),
    Setting("mamba_heads", ("mamba_n_heads",), 128),
    Setting("mamba_groups", ("mamba_n_groups",), 1),
    Setting("mamba_state", ("mamba_d_state",), 256),
    Setting("mamba_kernel", ("mamba_d_conv",), 4),
    Setting("mamba_bias", ("mamba_proj_bias",), False),
    Setting("mamba_kernel_bias", ("mamba_conv_bias",), True),
)
"""Settings of a `HybridConfig` that correspond one to one."""

MAMBA_NAMES: Names = {
    "attention/project": "mamba.in_proj",
    "attention/convolution": "mamba.conv1d.weight",
    "attention/convolution_bias": "mamba.conv1d.bias",
    "attention/log_rate": "mamba.A_log",
    "attention/step": "mamba.dt_bias",
    "attention/skip": "mamba.D",
    "attention/norm": "mamba.norm.weight",
    "attention/out": "mamba.out_proj",
}
"""Tensor names of Mamba-2."""

FAMILY = DecoderFamily(
    name="bamba",
    config_class=BambaConfig,
    config_map=ConfigMap(
        architecture="BambaForCausalLM",
        model_type="bamba",
        settings=(
            Setting("vocab_size", ("vocab_size",), 128_000),
            Setting("mlp", ("intermediate_size",), 14_336),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("max_positions", ("max_position_embeddings",), 262_144),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            *HYBRID_SETTINGS,
            Setting("mlp_bias", ("mlp_bias",), False),
        ),
        fixed={"hidden_act": "silu"},
        # The first two act in training and generation only, the last on the order of sums.
        silent=("z_loss_coefficient", "num_logits_to_keep", "mamba_chunk_size"),
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={
        **MAMBA_NAMES,
        "norm": "model.final_layernorm.weight",
        "feed_forward_norm": "pre_ff_layernorm.weight",
        "feed_forward/gate": "feed_forward.gate_proj",
        "feed_forward/up": "feed_forward.up_proj",
        "feed_forward/down": "feed_forward.down_proj",
    },
    sizes=("9B",),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
