"""Granite 4: a Granite with Mamba-2 in most layers, and feed-forward layers that are dense or mixtures of experts.

Outputs match transformers' `GraniteMoeHybridForCausalLM`.

Source: Granite Team, Granite 4.0 Language Models, 2025.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import NonNegativeInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.bamba import HYBRID_SETTINGS, MAMBA_NAMES, HybridConfig, read_mamba, write_mamba
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.granite import GRANITE_SETTINGS, ScaledConfig
from stack_train.models.granite_moe import GRANITE_EXPERTS, fused_in_granite
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.models.weight_map import Names
from stack_train.nn.experts import Experts, Router
from stack_train.nn.feed_forward import Gated, TokenLayer
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "GraniteMoeHybridConfig"]

_KINDS: Mapping[str, str] = {
    "mamba": "mamba",
    "linear_attention": "mamba",  # the names since transformers 5.20
    "attention": "attention",
    "full_attention": "attention",
}


@config
class GraniteMoeHybridConfig(HybridConfig, ScaledConfig, ExpertsConfig):
    """Size and numerics of a Granite 4; inherits the fields of `HybridConfig`, `ScaledConfig` and `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of an expert, or of the dense feed-forward layers if `experts` is 0.
      experts: number of experts per mixture; 0 for dense feed-forward layers.
      shared_mlp: hidden width of the shared expert, which is applied to every token; 0 if `experts` is 0.
      rotary: uses rotary positions in attention; otherwise it has no positional encoding.
    """

    name: Literal["granite_moe_hybrid"] = "granite_moe_hybrid"
    experts: NonNegativeInt = 0
    shared_mlp: NonNegativeInt = 0
    rotary: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.experts > 0) != (self.shared_mlp > 0):
            raise ConfigError(
                f"experts={self.experts} and shared_mlp={self.shared_mlp}: mixtures have a shared expert, and dense "
                "layers have the width mlp. Set both or none."
            )


def spec(config: GraniteMoeHybridConfig) -> DecoderSpec:
    fields: dict[str, Any] = {"bias": config.attention_bias, "output_bias": config.attention_bias}
    fields |= {"scale": config.score_scale} if config.rotary else {"scale": config.score_scale, "rope": None}
    attention, feed_forward = config.attention(**fields), _feed_forward(config)
    kinds = (attention if layer in config.attention_layers else config.mamba for layer in range(config.layers))
    options: Any = {"feed_forward": feed_forward, "residual_scale": config.residual_scale}
    return DecoderSpec(
        layers=tuple(Layer(attention=kind, **options) for kind in kinds),
        norm=Norm(epsilon=config.norm_epsilon),
        embedding_scale=config.embedding_scale,
        logit_scale=1 / config.logit_divisor,
    )


def _feed_forward(config: GraniteMoeHybridConfig) -> TokenLayer:
    if not config.experts:
        return Gated(width=config.mlp)
    router = Router(experts=config.experts, active=config.active_experts)
    return Experts(router=router, width=config.mlp, shared=config.shared_mlp, buffer=config.expert_buffer)


def _read(reader: Reader) -> dict[str, Any]:
    layers = reader.get("num_hidden_layers", default=32)
    kinds = reader.get("layer_types", "layers_block_type") or ["mamba"] * layers
    if not set(kinds) <= _KINDS.keys() or len(kinds) != layers:
        reader.problems.append(f"layer_types={kinds!r}, not {layers} of {', '.join(_KINDS)}")
    found: dict[str, Any] = {
        **read_rope(reader),
        **read_mamba(reader),
        "attention_layers": tuple(i for i, kind in enumerate(kinds) if _KINDS.get(kind) == "attention"),
        # transformers has positions for "rope" only; published files have "nope" otherwise.
        "rotary": reader.get("position_embedding_type") == "rope",
    }
    width = reader.get("shared_intermediate_size", default=1024)
    experts = reader.get("num_local_experts", default=8)
    return found | ({"shared_mlp": width} if experts else {"mlp": width, "shared_mlp": 0})


def _write(config: GraniteMoeHybridConfig) -> dict[str, Any]:
    kinds = ("attention" if layer in config.attention_layers else "mamba" for layer in range(config.layers))
    return {
        **write_rope(config),
        **write_mamba(config),
        "layer_types": list(kinds),
        "position_embedding_type": "rope" if config.rotary else None,
        "shared_intermediate_size": config.shared_mlp if config.experts else config.mlp,
    }


def _names(config: GraniteMoeHybridConfig) -> Names:
    place = "feed_forward/shared" if config.experts else "feed_forward"
    return {
        **MAMBA_NAMES,
        **(GRANITE_EXPERTS if config.experts else {}),
        f"{place}/gate/kernel": fused_in_granite("shared_mlp.input_linear", (0, 2)),
        f"{place}/up/kernel": fused_in_granite("shared_mlp.input_linear", (1, 2)),
        f"{place}/down": "shared_mlp.output_linear",
    }


FAMILY = DecoderFamily(
    name="granite_moe_hybrid",
    config_class=GraniteMoeHybridConfig,
    config_map=ConfigMap(
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        settings=(
            *GRANITE_SETTINGS,
            *HYBRID_SETTINGS,
            Setting("experts", ("num_local_experts",), 8),
            Setting("active_experts", ("num_experts_per_tok",), 2),
        ),
        # transformers reads neither "normalization_function" nor "init_method" of published files.
        fixed={"hidden_act": "silu"},
        silent=("mamba_chunk_size", "normalization_function", "init_method"),
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=_names,
    sizes=("350M", "1B", "Micro 3B", "Tiny 7B-A1B", "Small 32B-A9B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
