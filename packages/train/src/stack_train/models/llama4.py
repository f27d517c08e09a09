"""Llama 4: attention within chunks in three of four layers, and experts whose inputs are weighted.

Outputs match transformers' `Llama4ForCausalLM`. Layers without chunks omit rotary positions, and their queries grow
with the position.

Source: Meta, The Llama 4 Herd, 2025; layers without positions as in Yang et al., 2025 (arXiv:2501.18795).
"""

from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.mixtral import ExpertsConfig
from stack_train.models.reader import ConfigMap, Reader, Setting, read_rope, write_rope
from stack_train.models.smollm3 import rope_layers
from stack_train.models.weight_map import Stored
from stack_train.nn.attention import Rope, Temperature
from stack_train.nn.experts import Experts, Router
from stack_train.nn.feed_forward import Gated
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Llama4Config"]


@config
class Llama4Config(ExpertsConfig):
    """Size and numerics of a Llama 4; inherits the fields of `ExpertsConfig`.

    Attributes:
      name: selects this family.
      mlp: hidden width of dense feed-forward layers.
      expert_mlp: hidden width of an expert and of the shared expert.
      sparse_step: interval of layers with experts; layer i (from 0) has them if (i + 1) % sparse_step == 0.
      nope_interval: interval of layers that attend to all tokens, without rotary positions; layer i (from 0) is one if
        (i + 1) % nope_interval == 0.
      chunk: number of consecutive tokens that attend only to each other in the remaining layers.
      unit_norms: applies RMS norms without scales to rotated queries and keys.
      temperature_rate: growth of queries without rotary positions with the logarithm of their position; 0 leaves them
        unchanged.
      temperature_tokens: unit of that growth in tokens.
      attention_bias: adds biases to the projections of attention.
    """

    name: Literal["llama4"] = "llama4"
    rope_theta: PositiveFloat = 500_000.0
    norm_epsilon: PositiveFloat = 1e-5
    active_experts: PositiveInt = 1
    expert_mlp: PositiveInt = 512
    sparse_step: PositiveInt = 1
    nope_interval: PositiveInt = 4
    chunk: PositiveInt = 8192
    unit_norms: bool = True
    temperature_rate: NonNegativeFloat = 0.1
    temperature_tokens: PositiveInt = 8192
    attention_bias: bool = False


def spec(config: Llama4Config) -> DecoderSpec:
    bias: dict[str, Any] = {"bias": config.attention_bias, "output_bias": config.attention_bias}
    rope = Rope(theta=config.rope_theta, scaling=config.rope_scaling, interleaved=True)
    local = config.attention(rope=rope, chunk=config.chunk, unit_norms=config.unit_norms, **bias)
    # Position 0 has the number 1 here, as in transformers.
    temperature = Temperature(rate=config.temperature_rate, tokens=config.temperature_tokens, offset=1)
    whole = config.attention(rope=None, temperature=temperature if config.temperature_rate else None, **bias)
    sparse = Experts(
        router=Router(experts=config.experts, active=config.active_experts, score="sigmoid", normalized=False),
        width=config.expert_mlp,
        shared=config.expert_mlp,
        scaled_inputs=True,
        buffer=config.expert_buffer,
    )

    def layer(number: int, has_rope: int) -> Layer:
        dense = (number + 1) % config.sparse_step
        feed_forward = Gated(width=config.mlp) if dense else sparse
        return Layer(attention=local if has_rope else whole, feed_forward=feed_forward)

    kinds = rope_layers(config.layers, config.nope_interval)
    layers = tuple(layer(number, kind) for number, kind in enumerate(kinds))
    return DecoderSpec(layers=layers, norm=Norm(epsilon=config.norm_epsilon))


def _read(reader: Reader) -> dict[str, Any]:
    layers, step = reader.get("num_hidden_layers", default=48), reader.get("interleave_moe_layer_step", default=1)
    given = reader.get("no_rope_layers")  # [] is the default
    interval = given.index(0) + 1 if given and 0 in given else reader.get("no_rope_layer_interval", default=4)
    kinds = rope_layers(layers, interval)
    reader.get("no_rope_layer_interval")
    if given and given != kinds:
        reader.problems.append(f"no_rope_layers={given!r}, not {kinds!r}")
    sparse = list(range(step - 1, layers, step))
    if (reader.get("moe_layers") or sparse) != sparse:
        reader.problems.append(f"moe_layers={reader.get('moe_layers')!r}, not {sparse!r}")
    reader.expect_layers(["chunked_attention" if kind else "full_attention" for kind in kinds])
    rate = reader.get("attn_scale", default=0.1) if reader.get("attn_temperature_tuning", default=True) else 0.0
    return {**read_rope(reader, theta=500_000.0), "nope_interval": interval, "temperature_rate": rate}


def _write(config: Llama4Config) -> dict[str, Any]:
    step = config.sparse_step
    return {
        **write_rope(config),
        "no_rope_layers": rope_layers(config.layers, config.nope_interval),
        "moe_layers": list(range(step - 1, config.layers, step)),
        "attn_temperature_tuning": config.temperature_rate > 0,
        "attn_scale": config.temperature_rate,
    }


_EXPERTS = "feed_forward.experts."

FAMILY = DecoderFamily(
    name="llama4",
    config_class=Llama4Config,
    config_map=ConfigMap(
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        settings=(
            Setting("vocab_size", ("vocab_size",), 202_048),
            Setting("embed", ("hidden_size",), 5120),
            Setting("layers", ("num_hidden_layers",), 48),
            Setting("heads", ("num_attention_heads",), 40),
            Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 128, "head_size"),
            Setting("mlp", ("intermediate_size_mlp",), 16_384),
            Setting("expert_mlp", ("intermediate_size",), 8192),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
            Setting("experts", ("num_local_experts",), 16),
            Setting("active_experts", ("num_experts_per_tok",), 1),
            Setting("sparse_step", ("interleave_moe_layer_step",), 1),
            Setting("chunk", ("attention_chunk_size",), 8192),
            Setting("unit_norms", ("use_qk_norm",), True),
            Setting("temperature_tokens", ("floor_scale",), 8192),
            Setting("attention_bias", ("attention_bias",), False),
        ),
        fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
        silent=("for_llm_compressor",),  # changes how transformers stores experts
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names={
        **{f"feed_forward/{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
        **{f"feed_forward/shared/{name}": f"feed_forward.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        "feed_forward/router": "feed_forward.router",
        "feed_forward/expert_gate": Stored(name=_EXPERTS + "gate_up_proj", part=(0, 2)),
        "feed_forward/expert_up": Stored(name=_EXPERTS + "gate_up_proj", part=(1, 2)),
        "feed_forward/expert_down": Stored(name=_EXPERTS + "down_proj"),
    },
    published_in=("Llama4ForConditionalGeneration",),
    sizes=("Scout 109B-A17B", "Maverick 400B-A17B"),
    tested=("logits", "greedy", "gradients", "conversion"),
)
