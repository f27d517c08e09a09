"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: each layer is Mamba-2, attention, a feed-forward layer or experts.

Outputs match transformers' `NemotronHForCausalLM`, with one departure: transformers raises the step sizes of Mamba-2 to
at least `time_step_min` in a prompt, but not in later tokens. Here they are never raised, as in the published code of
Nemotron 3 Nano.

Source: NVIDIA, Nemotron-H, 2025 (arXiv:2504.03624), and Nemotron 3 Nano, 2025.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.bamba import MAMBA_NAMES, Mamba2Config, check_step_limit
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting
from stack_train.models.weight_map import Names, Stored
from stack_train.nn.experts import Experts, Router
from stack_train.nn.feed_forward import Plain
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "NemotronHConfig"]

_KINDS: Mapping[str, tuple[str, ...]] = {
    "M": ("linear_attention", "mamba"),
    "*": ("full_attention", "attention"),
    "-": ("mlp",),
    "E": ("moe",),
}
"""Names of each kind of layer in `layers_block_type`."""
_UNUSED = ("rope_theta", "rope_scaling", "tie_embeddings")


@config
class NemotronHConfig(Mamba2Config, ExpertsConfig):
    """Size and numerics of a Nemotron-H; inherits the fields of `Mamba2Config` and `ExpertsConfig`.

    Attributes:
      name: selects this family.
      layers: number of layers, each of a kind in `pattern`.
      pattern: kind of each layer: M for Mamba-2, * for attention without positions, - for a feed-forward layer, E for a
        mixture of experts. It repeats if there are more layers.
      mlp: hidden width of the feed-forward layers.
      expert_mlp: hidden width of an expert.
      shared_mlp: hidden width of the shared expert, which is applied to every token.
      expert_scale: factor of the experts' weights.
      normalized: divides the weights of a token's experts by their sum.
      bias_rate: change of the experts' selection biases per step, which balances their load.
    """

    name: Literal["nemotron_h"] = "nemotron_h"
    norm_epsilon: PositiveFloat = 1e-5
    pattern: str = "M-M-M-*-"
    expert_mlp: PositiveInt = 512
    shared_mlp: PositiveInt = 1024
    expert_scale: PositiveFloat = 1.0
    normalized: bool = True
    bias_rate: NonNegativeFloat = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.pattern or set(self.pattern) - _KINDS.keys():
            raise ConfigError(
                f"pattern={self.pattern!r}: expected a letter per layer: M (Mamba-2), * (attention), - (feed-forward) "
                "or E (mixture of experts)."
            )
        if len(self.pattern) > self.layers:
            raise ConfigError(
                f"pattern={self.pattern!r} has {len(self.pattern)} layers, more than layers={self.layers}; change one."
            )
        for field in fields(self):
            if field.name in _UNUSED and (value := getattr(self, field.name)) != field.default:
                raise ConfigError(
                    f"{field.name}={value!r}: Nemotron-H has no rotary positions, and its own head. Leave it out."
                )

    @property
    def kinds(self) -> str:
        """Kind of every layer."""
        return (self.pattern * self.layers)[: self.layers]

    @property
    def mixture(self) -> Experts:
        """Mixture of experts of this size."""
        router = Router(
            experts=self.experts,
            active=self.active_experts,
            score="sigmoid",
            normalized=self.normalized,
            scale=self.expert_scale,
            dtype="float32",  # as in checkpoints of Nemotron 3 Nano, which have bfloat16 otherwise
            bias_rate=self.bias_rate,
        )
        return Experts(
            router=router,
            width=self.expert_mlp,
            gated=False,
            activation="relu_squared",
            shared=self.shared_mlp,
            buffer=self.expert_buffer,
        )


def spec(config: NemotronHConfig) -> DecoderSpec:
    feed_forward = Plain(width=config.mlp, activation="relu_squared", bias=False)
    kinds = {
        "M": Layer(attention=config.mamba, feed_forward=None),
        "*": Layer(attention=config.attention(rope=None), feed_forward=None),
        "-": Layer(attention=None, feed_forward=feed_forward),
        "E": Layer(attention=None, feed_forward=config.mixture),
    }
    return DecoderSpec(layers=tuple(kinds[kind] for kind in config.kinds), norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    check_step_limit(reader)
    pattern = reader.get("hybrid_override_pattern", default="ME*-")
    if blocks := reader.get("layers_block_type", "layer_types"):
        known = {name: kind for kind, names in _KINDS.items() for name in names}
        if unknown := sorted({str(block) for block in blocks} - known.keys()):
            reader.problems.append(f"layers_block_type with {', '.join(unknown)}, not of {', '.join(known)}")
        pattern = "".join(known.get(str(block), "M") for block in blocks)
    elif not pattern or set(pattern) - _KINDS.keys():
        reader.problems.append(f"hybrid_override_pattern={pattern!r}, not of {', '.join(_KINDS)}")
    if (layers := reader.get("num_hidden_layers")) not in (None, len(pattern)):
        reader.problems.append(f"num_hidden_layers={layers}, not the {len(pattern)} of the pattern")
    return {"layers": len(pattern), "pattern": pattern}


def _write(config: NemotronHConfig) -> dict[str, Any]:
    # transformers raises step sizes to this minimum, and takes its logarithm, so 0 is an error.
    return {"hybrid_override_pattern": config.kinds, "time_step_min": 1e-30}


@dataclass(frozen=True, kw_only=True)
class _Family(DecoderFamily):
    def published_name(self, tensor: str) -> str:
        """Returns the published name of a tensor; transformers 5 has "model." for "backbone." in memory."""
        return "backbone." + tensor.removeprefix("model.") if tensor.startswith("model.") else tensor


def _experts(name: str) -> Stored:
    return Stored(name=f"mixer.experts.{{expert}}.{name}.weight", transposed=True, fused=f"mixer.experts.{name}")


_NAMES: Names = {
    "embedding": "backbone.embeddings.weight",
    "norm": "backbone.norm_f.weight",
    "attention_norm": "norm.weight",
    **{place: str(name).replace("mamba.", "mixer.") for place, name in MAMBA_NAMES.items()},
    **{f"attention/{name}": f"mixer.{name[0]}_proj" for name in ("query", "key", "value", "output")},
    "feed_forward_norm": "norm.weight",
    **{f"feed_forward/{name}": f"mixer.{name}_proj" for name in ("up", "down")},
    **{f"feed_forward/shared/{name}": f"mixer.shared_experts.{name}_proj" for name in ("up", "down")},
    "feed_forward/router": "mixer.gate",
    "feed_forward/selection_bias": "mixer.gate.e_score_correction_bias",
    "feed_forward/expert_up": _experts("up_proj"),
    "feed_forward/expert_down": _experts("down_proj"),
}

FAMILY = _Family(
    name="nemotron_h",
    config_class=NemotronHConfig,
    config_map=ConfigMap(
        architecture="NemotronHForCausalLM",
        model_type="nemotron_h",
        settings=(
            Setting("vocab_size", ("vocab_size",), 131_072),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("head_dim", ("head_dim", "attention_head_dim"), 128, "head_size"),
            Setting("mlp", ("intermediate_size",), 21_504),
            Setting("max_positions", ("max_position_embeddings",), 4096),
            Setting("norm_epsilon", ("layer_norm_epsilon",), 1e-5),
            Setting("mamba_heads", ("mamba_num_heads",), 128),
            Setting("mamba_head_dim", ("mamba_head_dim",), 64),
            Setting("mamba_groups", ("n_groups", "mamba_n_groups"), 8),
            Setting("mamba_state", ("ssm_state_size",), 128),
            Setting("mamba_kernel", ("conv_kernel", "mamba_d_conv"), 4),
            Setting("mamba_bias", ("use_bias",), False),
            Setting("mamba_kernel_bias", ("use_conv_bias", "mamba_conv_bias"), True),
            Setting("experts", ("n_routed_experts", "num_local_experts"), 8),
            Setting("active_experts", ("num_experts_per_tok",), 2),
            Setting("expert_mlp", ("moe_intermediate_size",), 7688),
            Setting("shared_mlp", ("moe_shared_expert_intermediate_size",), 7688),
            Setting("expert_scale", ("routed_scaling_factor",), 1.0),
            Setting("normalized", ("norm_topk_prob",), True),
        ),
        fixed={
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "sliding_window": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_latent_size": None,
            "num_nextn_predict_layers": 0,
        },
        silent=(
            # Published files have these keys, which transformers does not read.
            *("expand", "mamba_expand", "mamba_proj_bias", "moe_shared_expert_overlap", "norm_eps", "rms_norm_eps"),
            *("partial_rotary_factor", "residual_in_fp32", "rope_parameters", "rope_theta", "use_mamba_kernels"),
            # They act on initial values, on the order of sums, on the cache's dtype, and on layers that are not read.
            *("rescale_prenorm_residual", "time_step_floor", "time_step_max", "time_step_min", "num_logits_to_keep"),
            *("chunk_size", "mamba_chunk_size", "mamba_ssm_cache_dtype"),
            *("mtp_layers_block_type", "mtp_hybrid_override_pattern"),
        ),
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=_NAMES,
    layer_prefix="backbone.layers.{layer}.",
    sizes=("4B", "8B", "47B", "56B", "Nano 2 9B", "Nano 2 12B", "3 Nano 30B-A3B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
