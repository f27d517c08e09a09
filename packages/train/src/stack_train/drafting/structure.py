"""Recognition of a decoder's structure from `config.json` and the names and shapes of its tensors.

Only features that a decoder here can compute are recognized. Remaining tensors and keys are listed as unknown.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stack_core.abi.errors import ConversionError
from stack_train.models.harmless_keys import HARMLESS_KEYS
from stack_train.models.reader import COMMON

__all__ = ["KNOWN_KEYS", "Key", "Structure", "recognize"]

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OUTER = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
_INPUT, _POST = "input_layernorm.weight", "post_attention_layernorm.weight"
_BEFORE, _AFTER = "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"
_MATRICES = tuple(f"self_attn.{name}_proj" for name in "qkvo") + tuple(f"mlp.{x}_proj" for x in ("gate", "up", "down"))
_NORMS: Mapping[frozenset[str], tuple[dict[str, bool], dict[str, str]]] = {
    frozenset({_INPUT, _POST}): ({}, {}),
    frozenset({_POST, _AFTER}): (
        {"input_norms": False, "output_norms": True},
        {"attention_output_norm": _POST, "feed_forward_output_norm": _AFTER},
    ),
    frozenset({_INPUT, _POST, _BEFORE, _AFTER}): (
        {"output_norms": True},
        {"attention_output_norm": _POST, "feed_forward_norm": _BEFORE, "feed_forward_output_norm": _AFTER},
    ),
}
"""Fields of a `Layer` and tensor names that differ from the default ones, by the norms of a layer."""
_GATE = "mlp.gate_proj"
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
_ACTIVATIONS |= {"relu": "relu", "relu2": "relu_squared"}


@dataclass(frozen=True)
class Key:
    """A key of `config.json` with a known meaning.

    Attributes:
      ours: field of the drafted config.
      annotation, default: its type and default, as source.
      attention, layer, spec: expressions of `config` for fields of `Attention`, `Layer` and `DecoderSpec`.
    """

    ours: str
    annotation: str
    default: str
    attention: Mapping[str, str] = field(default_factory=dict)
    layer: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, str] = field(default_factory=dict)


_FACTOR = "PositiveFloat"
KNOWN_KEYS: Mapping[str, Key] = {
    "embedding_multiplier": Key("embedding_scale", _FACTOR, "1.0", spec={"embedding_scale": "config.embedding_scale"}),
    "attention_multiplier": Key(
        "attention_scale", f"{_FACTOR} | None", "None", attention={"scale": "config.attention_scale"}
    ),
    "residual_multiplier": Key("residual_scale", _FACTOR, "1.0", layer={"residual_scale": "config.residual_scale"}),
    "logits_scaling": Key("logit_divisor", _FACTOR, "1.0", spec={"logit_scale": "1 / config.logit_divisor"}),
    "query_pre_attn_scalar": Key("query_scalar", _FACTOR, "256.0", attention={"scale": "config.query_scalar**-0.5"}),
    "attn_logit_softcapping": Key(
        "attention_softcap", f"{_FACTOR} | None", "None", attention={"softcap": "config.attention_softcap"}
    ),
    "final_logit_softcapping": Key(
        "logit_softcap", f"{_FACTOR} | None", "None", spec={"logit_softcap": "config.logit_softcap"}
    ),
}
"""Keys that mean the same in every published model that has them."""

_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_READ = frozenset({name for setting in COMMON for name in setting.names}) | frozenset(_ROPE)


@dataclass(frozen=True, kw_only=True)
class Structure:
    """A recognized decoder.

    Attributes:
      architecture, model_type: of `config.json`.
      layers: number of layers, all of which have the same tensors.
      fixed: keys of `config.json` for which the draft supports only this value.
      keys: the known keys of `config.json`, in addition to the common ones.
      attention, layer: fields of `Attention` and `Layer` that follow from tensors.
      bias, mlp_bias: the key of `config.json` that sets the biases of attention and of the feed-forward layer; "" if
        they follow from tensors, None without biases.
      output_bias: True if attention also adds a bias to its output.
      gated: True if the feed-forward layer has a gate.
      activation: activation of the feed-forward layer.
      kinds: True if `config.json` contains `layer_types`.
      window: True if the sliding layers in `layer_types` have a window.
      nope: True if `no_rope_layers` names layers without rotary positions.
      names: tensor names that differ from the default ones.
      tied: True if the embedding is the head although `config.json` lacks `tie_word_embeddings`.
      unknown: descriptions of the structure that was not recognized.
      unknown_keys: keys of `config.json` whose meaning is not known.
    """

    architecture: str
    model_type: str
    layers: int
    fixed: Mapping[str, Any]
    keys: Mapping[str, Key]
    attention: Mapping[str, str]
    layer: Mapping[str, bool]
    bias: str | None
    mlp_bias: str | None
    output_bias: bool
    gated: bool
    activation: str
    kinds: bool
    window: bool
    nope: bool
    names: Mapping[str, str]
    tied: bool
    unknown: tuple[str, ...]
    unknown_keys: tuple[str, ...]


def recognize(mapping: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Structure:
    """Recognizes the structure of a checkpoint.

    Args:
      mapping: its `config.json`.
      shapes: shapes of its tensors by name.

    Raises:
      ConversionError: no tensors have the names of a decoder's layers.
    """
    layers: dict[int, dict[str, tuple[int, ...]]] = {}
    unknown = []
    for name, shape in shapes.items():
        if (match := _LAYER.fullmatch(name)) is not None:
            layers.setdefault(int(match[1]), {})[match[2]] = shape
        elif name not in _OUTER:
            unknown.append(f"tensor {name} {list(shape)}")
    if not layers:
        raise ConversionError(
            "No tensor is named model.layers.N..., as in decoders of transformers. Other structures are not drafted; "
            "begin from the file of a family that is similar (stack models)."
        )
    first = layers[min(layers)]
    for number, tensors in sorted(layers.items()):
        if tensors != first:
            differing = sorted(set(tensors.items()) ^ set(first.items()))
            unknown.append(f"layer {number} has other tensors than layer {min(layers)}: {differing[0][0]} and others")
            break
    parts = _Parts(mapping, first, unknown)
    # In the order in which tensors and keys are described.
    norms, names = parts.norms()
    attention, biases = parts.attention(), parts.biases()
    activation = parts.activation()
    keys, fixed, window, nope = parts.keys()
    return Structure(
        architecture=str((mapping.get("architectures") or ["none"])[0]),
        model_type=str(mapping.get("model_type")),
        layers=len(layers),
        fixed=fixed,
        keys=keys,
        attention=attention,
        layer=norms,
        bias=biases[0],
        mlp_bias=biases[1],
        output_bias=biases[0] == "attention_bias" or parts.has_output_bias,
        gated=parts.has_gate,
        activation=activation,
        kinds=bool(mapping.get("layer_types")),
        window=window,
        nope=nope,
        names=names,
        tied="lm_head.weight" not in shapes and "tie_word_embeddings" not in mapping,
        unknown=tuple(unknown),
        unknown_keys=parts.unread(),
    )


class _Parts:
    """The parts of a layer. Each part removes its tensors and keys from the remaining ones."""

    def __init__(self, mapping: Mapping[str, Any], tensors: Mapping[str, tuple[int, ...]], unknown: list[str]) -> None:
        self.mapping, self.tensors, self.unknown = mapping, dict(tensors), unknown
        heads = mapping.get("num_attention_heads", 1)
        self.head_dim = mapping.get("head_dim") or mapping.get("hidden_size", 0) // heads
        self.read = set(_READ | HARMLESS_KEYS)
        self.has_output_bias = False
        self.has_gate = f"{_GATE}.weight" in tensors

    def norms(self) -> tuple[dict[str, bool], dict[str, str]]:
        found = frozenset(name for name in self.tensors if name in (_INPUT, _POST, _BEFORE, _AFTER))
        for name in found:
            del self.tensors[name]
        if found not in _NORMS:
            self.unknown.append(f"the placement of the norms {', '.join(sorted(found)) or 'none'}")
        return _NORMS.get(found, ({}, {}))

    def attention(self) -> dict[str, str]:
        found: dict[str, str] = {}
        widths = {"q_norm": "num_attention_heads", "k_norm": "num_key_value_heads"}
        for name, heads in widths.items():
            shape = self.tensors.pop(f"self_attn.{name}.weight", None)
            if shape == (self.head_dim,):
                found["head_norms"] = "True"
            elif shape == (self.head_dim * self.mapping.get(heads, 0),):
                found["whole_norms"] = "True"
            elif shape is not None:
                self.unknown.append(f"tensor self_attn.{name}.weight {list(shape)}")
        if self.tensors.pop("self_attn.sinks", None) is not None:
            found["sinks"] = "True"
        self.tensors.pop("self_attn.rotary_emb.inv_freq", None)
        return found

    def biases(self) -> tuple[str | None, str | None]:
        """Returns the keys of the biases of attention and feed-forward layer; also checks their matrices."""
        matrices = [name for name in _MATRICES if self.has_gate or name != _GATE]
        missing = [name for name in matrices if self.tensors.pop(f"{name}.weight", None) is None]
        self.unknown += [f"no tensor {name}.weight" for name in missing]
        present = [self.tensors.pop(f"{name}.bias", None) is not None for name in matrices]
        self.unknown += [f"tensor of a layer {name} {list(shape)}" for name, shape in sorted(self.tensors.items())]
        queries, output, feed_forward = present[:3], present[3], present[4:]
        self.has_output_bias = output
        for label, flags in (("queries, keys and values", queries), ("the feed-forward layer", feed_forward)):
            if len(set(flags)) > 1:
                self.unknown.append(f"biases of some of {label}")
        if output and not queries[0]:
            self.unknown.append("a bias of the output of attention only")
        attention = self._bias_key("attention_bias", queries[0])
        if attention == "attention_bias" and queries[0] != output:
            self.unknown.append("attention_bias, which sets the biases of queries only")
        return attention, self._bias_key("mlp_bias", feed_forward[0])

    def _bias_key(self, key: str, present: bool) -> str | None:
        if isinstance(self.mapping.get(key), bool) and self.mapping[key] == present:
            self.read.add(key)
            return key
        return "" if present else None

    def activation(self) -> str:
        names = [name for name in ("hidden_act", "hidden_activation") if self.mapping.get(name) is not None]
        given = self.mapping[names[0]] if names else "silu"
        if given not in _ACTIVATIONS:
            self.unknown.append(f"{names[0]}={given!r}")
        return _ACTIVATIONS.get(given, "silu")

    def keys(self) -> tuple[dict[str, Key], dict[str, Any], bool, bool]:
        """Returns the known keys, the fixed ones, and whether layers have windows or lack rotary positions."""
        mapping, fixed = self.mapping, dict[str, Any]()
        keys = {name: key for name, key in KNOWN_KEYS.items() if mapping.get(name) is not None}
        for name in ("hidden_act", "hidden_activation"):
            if mapping.get(name) is not None:
                fixed[name] = mapping[name]
        kinds = mapping.get("layer_types") or []
        if wrong := set(kinds) - {"full_attention", "sliding_attention"}:
            self.unknown.append(f"layer_types {', '.join(sorted(wrong))}")
        window = "sliding_attention" in kinds
        rope = mapping.get("no_rope_layers")
        nope = isinstance(rope, list) and len(rope) == mapping.get("num_hidden_layers")
        self.read |= {*KNOWN_KEYS, *fixed, "layer_types"}
        self.read |= {"no_rope_layers", "no_rope_layer_interval"} if nope else set()
        self.read |= {"sliding_window"} if window else set()
        return keys, fixed, window, nope

    def unread(self) -> tuple[str, ...]:
        """Returns the keys without a known meaning, except for null, false, 0 and empty values."""
        return tuple(name for name, value in self.mapping.items() if name not in self.read and value)
