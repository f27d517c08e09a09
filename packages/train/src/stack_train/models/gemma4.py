"""Gemma 4, text: local and global layers with different heads, shared keys and values, per-layer embeddings.

Outputs match transformers' `Gemma4ForCausalLM`. Layers of a mixture (26B-A4B) have a dense layer and experts.

Source: transformers, `Gemma4TextModel`; per-layer embeddings and shared keys as in Gemma 3n.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core import ops
from stack_core.abi.config import changed_fields, config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.gemma3 import GEMMA_NAMES
from stack_train.models.reader import ConfigMap, Reader, Setting, periodic, read_rope, write_rope
from stack_train.models.weight_map import Names, Stored
from stack_train.nn.attention import Attention, Rope
from stack_train.nn.experts import Router
from stack_train.nn.feed_forward import Gated, TokenLayer
from stack_train.nn.layer_inputs import InputGate
from stack_train.nn.parallel_experts import ParallelExperts
from stack_train.nn.residual import Norm

__all__ = ["FAMILY", "Gemma4Config", "Gemma4Settings", "spec"]

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_PERIOD = 6


@config
class Gemma4Settings(DecoderConfig):
    """Settings of a Gemma 4, with images or without; inherits the fields of `DecoderConfig`.

    Attributes:
      rope_theta: base of the rotary frequencies in global layers.
      rope_scaling: scaling of rotary positions in global layers; the default rotates a quarter of each head.
      global_layers: indices of the layers that attend to all tokens; None has every sixth layer and the last.
      window: size of the attention window of local layers in tokens, the query included.
      local_theta: base of the rotary frequencies in local layers.
      global_head_dim: width of a head in global layers; None is the width in local layers.
      global_kv_heads: number of key-value heads in global layers; None is the number in local layers.
      keys_as_values: uses the projected keys as values in global layers, without a projection of values.
      shared_layers: number of final layers that read the keys and values of the last earlier layer of the same kind.
      wide_shared_mlp: doubles the hidden width of the feed-forward layers in `shared_layers`.
      per_layer_input: width of per-layer embeddings, which each layer adds through a gate; 0 disables these.
      logit_softcap: soft cap of the logits; None disables the cap.
      experts: number of experts per layer; 0 has dense layers only.
      active_experts: number of experts per token.
      expert_mlp: hidden width of an expert.
      expert_buffer: capacity of each device's receive buffer relative to the rows it sends. Excess rows are dropped;
        None drops none.
    """

    rope_theta: PositiveFloat = 1_000_000.0
    rope_scaling: Annotated[ops.RopeScaling, Field(discriminator="rope_type")] | None = ops.ProportionalScaling(
        partial_rotary_factor=0.25
    )
    tie_embeddings: bool = True
    global_layers: tuple[NonNegativeInt, ...] | None = None
    window: PositiveInt = 512
    local_theta: PositiveFloat = 10_000.0
    global_head_dim: PositiveInt | None = None
    global_kv_heads: PositiveInt | None = None
    keys_as_values: bool = False
    shared_layers: NonNegativeInt = 0
    wide_shared_mlp: bool = False
    per_layer_input: NonNegativeInt = 0
    logit_softcap: PositiveFloat | None = None
    experts: NonNegativeInt = 0
    active_experts: PositiveInt = 8
    expert_mlp: PositiveInt = 704
    expert_buffer: PositiveFloat | None = None

    def __post_init__(self) -> None:
        self.check_heads()
        if self.global_head_size % 2:
            raise ConfigError(
                f"global_head_dim={self.global_head_size} is odd; rotary positions turn pairs of features."
            )
        if self.heads % self.global_kv_head_count:
            raise ConfigError(
                f"heads={self.heads} is not a multiple of global_kv_heads={self.global_kv_head_count}; change one of "
                "them."
            )
        if outside := [layer for layer in self.global_layers or () if layer >= self.layers]:
            raise ConfigError(f"global_layers names {outside}, and the model has layers={self.layers}; remove them.")
        if self.kinds[-1] != _GLOBAL:
            # transformers makes the last layer global in any case, so an export would be another model.
            raise ConfigError(f"global_layers lacks the last layer, {self.layers - 1}, which is always global; add it.")
        if 0 < self.experts < self.active_experts:
            raise ConfigError(
                f"active_experts={self.active_experts} is more than experts={self.experts}; change one of them."
            )
        if not self.experts and (unused := changed_fields(self, ("active_experts", "expert_mlp", "expert_buffer"))):
            raise ConfigError(f"{' and '.join(unused)} would have no effect without experts: set experts as well.")
        if self.wide_shared_mlp and not self.shared_layers:
            raise ConfigError("wide_shared_mlp has no layers to act on: set shared_layers, or leave it out.")
        own = self.kinds[: max(self.layers - self.shared_layers, 0)]
        if missing := set(self.kinds) - set(own):
            raise ConfigError(
                f"shared_layers={self.shared_layers} of layers={self.layers} leaves no {' or '.join(sorted(missing))} "
                "layer with keys and values of its own, which the last ones use. Lower shared_layers."
            )

    @property
    def kinds(self) -> list[str]:
        """Kind of each layer, as in `layer_types`."""
        if self.global_layers is None:
            return [*periodic(self.layers, _PERIOD)[:-1], _GLOBAL]
        return [_GLOBAL if layer in self.global_layers else _LOCAL for layer in range(self.layers)]

    @property
    def global_head_size(self) -> int:
        """Width of a head in global layers."""
        return self.head_size if self.global_head_dim is None else self.global_head_dim

    @property
    def global_kv_head_count(self) -> int:
        """Number of key-value heads in global layers."""
        return self.kv_head_count if self.global_kv_heads is None else self.global_kv_heads


@config
class Gemma4Config(Gemma4Settings):
    """Size and numerics of a Gemma 4 text model; inherits the fields of `Gemma4Settings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["gemma4"] = "gemma4"


def spec(config: Gemma4Settings) -> DecoderSpec:
    """Returns the architecture; scores are not scaled, since queries and keys are normalized.

    Tokens of an image attend to each other in both directions in local layers only.
    """
    kinds, first_shared = config.kinds, config.layers - config.shared_layers
    common: dict[str, Any] = {"head_norms": True, "value_norms": True, "scale": 1.0}

    def attention(number: int) -> Attention:
        kind, fields = kinds[number], dict(common)
        if kind == _LOCAL:
            fields |= {"window": config.window, "rope": Rope(theta=config.local_theta)}
        else:
            fields |= {"head_dim": config.global_head_size, "kv_heads": config.global_kv_head_count}
            fields |= {"keys_as_values": config.keys_as_values, "causal_images": True}
        if number >= first_shared:
            fields["source"] = max(layer for layer in range(first_shared) if kinds[layer] == kind)
        return config.attention(**fields)

    def feed_forward(number: int) -> TokenLayer:
        is_wide = config.wide_shared_mlp and number >= first_shared
        width = config.mlp * (1 + is_wide)
        if not config.experts:
            return Gated(width=width, activation="gelu_tanh")
        router = Router(experts=config.experts, active=config.active_experts, expert_scales=True)
        sizes = {"width": config.expert_mlp, "dense": width, "buffer": config.expert_buffer}
        return ParallelExperts(router=router, activation="gelu_tanh", **sizes)

    def layer(number: int) -> Layer:
        return Layer(
            attention=attention(number),
            feed_forward=feed_forward(number),
            feed_forward_norm=not config.experts,
            output_norms=True,
            input_gate=InputGate(width=config.per_layer_input) if config.per_layer_input else None,
            output_scale=True,
        )

    return DecoderSpec(
        layers=tuple(map(layer, range(config.layers))),
        norm=Norm(epsilon=config.norm_epsilon),
        embedding_scale=config.embed**0.5,
        logit_softcap=config.logit_softcap,
    )


def _read(reader: Reader) -> dict[str, Any]:
    layers = reader.get("num_hidden_layers", default=30)
    kinds = list(reader.get("layer_types") or periodic(layers, _PERIOD))
    # transformers makes the last layer global, whatever the file has.
    kinds[-1:] = [_GLOBAL]
    if len(kinds) != layers or not set(kinds) <= {_LOCAL, _GLOBAL}:
        reader.problems.append(f"layer_types={kinds!r}, not {_LOCAL} or {_GLOBAL} for each of {layers} layers")
    global_layers = tuple(layer for layer, kind in enumerate(kinds) if kind == _GLOBAL)
    if (bidirectional := reader.get("use_bidirectional_attention")) not in (None, "vision"):
        # "vision" concerns image tokens only, which a text model does not have.
        reader.problems.append(f"use_bidirectional_attention={bidirectional!r}, not null or 'vision'")
    shared = reader.get("num_kv_shared_layers", default=0) or 0
    is_wide = bool(reader.get("use_double_wide_mlp", default=False)) and shared > 0
    return {
        **_read_ropes(reader),
        **_read_heads(reader, global_layers),
        "global_layers": global_layers,
        "shared_layers": shared,
        "wide_shared_mlp": is_wide,
        "per_layer_input": _read_layer_input(reader),
        **_read_experts(reader),
    }


def _read_experts(reader: Reader) -> dict[str, Any]:
    names = {"experts": "num_experts", "active_experts": "top_k_experts", "expert_mlp": "moe_intermediate_size"}
    found = {ours: reader.get(name) for ours, name in names.items()}
    if not reader.get("enable_moe_block", default=False):
        return {"experts": 0}
    if missing := [names[ours] for ours, value in found.items() if not value]:
        reader.problems.append(f"enable_moe_block=True without {' and '.join(missing)}")
    return {ours: value for ours, value in found.items() if value}


def _read_ropes(reader: Reader) -> dict[str, Any]:
    given = reader.get("rope_parameters") or {}
    local = given.get(_LOCAL) or {}
    extra = {name: value for name, value in local.items() if name not in ("rope_type", "rope_theta") and value}
    if local.get("rope_type", "default") != "default" or extra:
        reader.problems.append(f"rope_parameters.{_LOCAL}={local!r}, not of rope_type 'default'")
    rope = read_rope(reader, theta=1_000_000.0, kind=_GLOBAL)
    if given and not isinstance(given.get(_GLOBAL), Mapping):
        reader.problems.append(f"rope_parameters={given!r}, not with an entry for {_GLOBAL}")
    if not given:
        rope["rope_scaling"] = ops.ProportionalScaling(partial_rotary_factor=0.25)
    return {**rope, "local_theta": float(local.get("rope_theta") or 10_000.0)}


def _read_heads(reader: Reader, global_layers: tuple[int, ...]) -> dict[str, Any]:
    """Reads the heads of global layers: published files have a key for each, transformers saves overrides by layer."""
    head_dim = reader.get("global_head_dim", default=512)
    kv_heads = reader.get("num_global_key_value_heads")
    if not reader.get("attention_k_eq_v", default=False):
        kv_heads = None
    overrides: Mapping[str, Any] | None = reader.get("per_layer_config")
    if overrides is not None:
        values: Mapping[str, Any] = next(iter(overrides.values()), {})
        is_uniform = not overrides or overrides == dict.fromkeys(map(str, global_layers), values)
        if not is_uniform or values.keys() - {"head_dim", "num_key_value_heads"}:
            expected = f"equal head_dim and num_key_value_heads for the layers {list(global_layers)}"
            reader.problems.append(f"per_layer_config={dict(overrides)!r}, not {expected}")
        head_dim = values.get("head_dim") or reader.get("head_dim", default=256)
        kv_heads = values.get("num_key_value_heads")
    return {"global_head_dim": head_dim, "global_kv_heads": kv_heads}


def _read_layer_input(reader: Reader) -> int:
    width = reader.get("hidden_size_per_layer_input", default=256) or 0
    vocab = reader.get("vocab_size", default=262_144)
    if (given := reader.get("vocab_size_per_layer_input", default=262_144)) != vocab and width:
        reader.problems.append(f"vocab_size_per_layer_input={given}, not the vocab_size {vocab}")
    return int(width)


def _write(config: Gemma4Settings) -> dict[str, Any]:
    rope = write_rope(config)
    scaling = rope["rope_scaling"] or {"rope_type": "default"}
    heads: dict[str, Any] = {"head_dim": config.global_head_size, "num_key_value_heads": config.global_kv_head_count}
    by_layer = {str(layer): heads for layer, kind in enumerate(config.kinds) if kind == _GLOBAL}
    # Without `attention_k_eq_v`, transformers ignores the key for the number of global heads.
    is_expressible = config.keys_as_values or config.global_kv_head_count == config.kv_head_count
    return {
        "layer_types": config.kinds,
        "rope_parameters": {
            _GLOBAL: {**scaling, "rope_theta": config.rope_theta},
            _LOCAL: {"rope_type": "default", "rope_theta": config.local_theta},
        },
        "global_head_dim": config.global_head_size,
        "num_global_key_value_heads": config.global_kv_head_count,
        **({} if is_expressible else {"per_layer_config": by_layer}),
        "num_kv_shared_layers": config.shared_layers,
        "use_double_wide_mlp": config.wide_shared_mlp,
        "hidden_size_per_layer_input": config.per_layer_input,
        "vocab_size_per_layer_input": config.vocab_size,
        "enable_moe_block": config.experts > 0,
        "num_experts": config.experts or None,
        "top_k_experts": config.active_experts if config.experts else None,
        "moe_intermediate_size": config.expert_mlp if config.experts else None,
    }


def _joined(name: str, part: tuple[int, int]) -> Stored:
    """Returns the place of a matrix in a tensor of the joined matrices of all experts, [..., d_out, d_in]."""
    return Stored(name=name, transposed=True, part=part, part_axis=-2)


_NAMES: Names = {
    **GEMMA_NAMES,
    "input_gate/gate": "per_layer_input_gate",
    "input_gate/output": "per_layer_projection",
    "input_gate_norm": "post_per_layer_input_norm.weight",
    "output_scale": "layer_scalar",
    "layer_inputs/embedding": "model.embed_tokens_per_layer.weight",
    "layer_inputs/project/kernel": Stored(name="model.per_layer_model_projection.weight", transposed=True),
    "layer_inputs/norm": "model.per_layer_projection_norm.weight",
}
_EXPERT_NAMES: Names = {
    "feed_forward/dense_norm": "pre_feedforward_layernorm.weight",
    "feed_forward/dense_output_norm": "post_feedforward_layernorm_1.weight",
    "feed_forward/expert_norm": "pre_feedforward_layernorm_2.weight",
    "feed_forward/expert_output_norm": "post_feedforward_layernorm_2.weight",
    "feed_forward/router_scale": "router.scale",
    "feed_forward/router": "router.proj",
    "feed_forward/expert_scales": "router.per_expert_scale",
    "feed_forward/expert_gate": _joined("experts.gate_up_proj", (0, 2)),
    "feed_forward/expert_up": _joined("experts.gate_up_proj", (1, 2)),
    "feed_forward/expert_down": _joined("experts.down_proj", (0, 1)),
    **{f"feed_forward/dense/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
"""Tensor names of a dense layer and experts side by side."""
_UNUSED = tuple(f"model.layers.{{layer}}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))
"""Tensors that published checkpoints also have for layers with shared keys and values."""

FAMILY = DecoderFamily(
    name="gemma4",
    config_class=Gemma4Config,
    config_map=ConfigMap(
        architecture="Gemma4ForCausalLM",
        model_type="gemma4_text",
        settings=(
            Setting("vocab_size", ("vocab_size",), 262_144),
            Setting("embed", ("hidden_size",), 2304),
            Setting("layers", ("num_hidden_layers",), 30),
            Setting("heads", ("num_attention_heads",), 8),
            Setting("kv_heads", ("num_key_value_heads",), 4, "kv_head_count"),
            Setting("head_dim", ("head_dim",), 256, "head_size"),
            Setting("mlp", ("intermediate_size",), 9216),
            Setting("max_positions", ("max_position_embeddings",), 131_072),
            Setting("tie_embeddings", ("tie_word_embeddings",), True),
            Setting("window", ("sliding_window",), 512),
            Setting("keys_as_values", ("attention_k_eq_v",), False),
            Setting("logit_softcap", ("final_logit_softcapping",)),
        ),
        fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
        read_others=_read,
        write_others=_write,
    ),
    spec=spec,
    names=lambda config: {**_NAMES, **_EXPERT_NAMES} if config.experts else _NAMES,
    redundant=dict.fromkeys(_UNUSED),
    sizes=("E2B", "E4B", "26B-A4B", "31B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages", "w8a8 pages"),
)
