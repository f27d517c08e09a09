"""Source of a drafted family."""

import json
from collections.abc import Mapping
from typing import Any

from stack_train.drafting.structure import Key, Structure
from stack_train.models.reader import COMMON

__all__ = ["family_source"]

_TEXTS = {
    "embedding_scale": "factor of the embedded tokens.",
    "attention_scale": "factor of the attention scores.",
    "residual_scale": "factor of the outputs of attention and feed-forward layers in the residual sum.",
    "logit_divisor": "the logits are divided by it.",
    "query_scalar": "attention scores are scaled by query_scalar ** -0.5.",
    "attention_softcap": "soft cap of the attention scores; None has no cap.",
    "logit_softcap": "soft cap of the logits; None has no cap.",
}
_CONSTRAINED = ("PositiveFloat", "PositiveInt")


def family_source(name: str, structure: Structure, defaults: Mapping[str, Any]) -> str:
    """Returns the source of a family's file.

    Args:
      name: name of the family, such as "olmo2".
      structure: recognized structure of a checkpoint.
      defaults: values that transformers assumes for keys that `config.json` may omit; empty if they are not known.
    """
    config = "".join(part.capitalize() for part in name.split("_")) + "Config"
    fields, settings = _fields(structure, defaults)
    converters = _converters(structure, defaults)
    reader = "ConfigMap, Reader, Setting, read_rope" if converters else "ConfigMap, Setting"
    reader += ", write_rope" if structure.window else ""
    constrained = [each for each in _CONSTRAINED if any(each in annotation for _, annotation, *_ in fields)]
    todo = [f"# TODO, not recognized: {each}" for each in structure.unknown]
    todo += [f"# TODO, unknown key of config.json: {each}" for each in structure.unknown_keys]
    if not defaults:
        todo.append("# TODO: a Setting for each common key whose default in transformers differs from `COMMON`")
    lines = [
        f'"""TODO: {name} in a sentence.',
        "",
        f"Outputs match transformers' `{structure.architecture}`.",
        "",
        "Source: TODO.",
        '"""',
        *(["", *todo] if todo else []),
        "",
        f"from typing import {'Any, ' if converters else ''}Literal",
        "",
        *([f"from pydantic import {', '.join(constrained)}", ""] if constrained else []),
        "from stack_core.abi.config import config",
        "from stack_train.models.decoder import DecoderConfig, DecoderSpec, Layer",
        "from stack_train.models.family import DecoderFamily",
        f"from stack_train.models.reader import {reader}",
        f"from stack_train.nn.feed_forward import {'Gated' if structure.gated else 'Plain'}",
        "from stack_train.nn.residual import Norm",
        "",
        f'__all__ = ["FAMILY", "{config}"]',
        "",
        "",
        "@config",
        f"class {config}(DecoderConfig):",
        f'    """Size and numerics of a {name}; inherits the fields of `DecoderConfig`.',
        "",
        "    Attributes:",
        "      name: selects this family.",
        *(f"      {field}: {text}" for field, *_, text in fields),
        '    """',
        "",
        f'    name: Literal["{name}"] = "{name}"',
        *(f"    {field}: {annotation} = {default}" for field, annotation, default, _ in fields),
        "",
        "",
        *_spec(config, structure),
        *converters,
        "FAMILY = DecoderFamily(",
        f'    name="{name}",',
        f"    config_class={config},",
        "    config_map=ConfigMap(",
        f"        architecture={json.dumps(structure.architecture)},",
        f"        model_type={json.dumps(structure.model_type)},",
        *(
            ["        settings=(", *(f"            {setting}," for setting in settings), "        ),"]
            if settings
            else []
        ),
        f"        fixed={_dict(structure.fixed)},",
        *(["        read_others=_read,"] if converters else []),
        *(["        write_others=_write,"] if structure.window else []),
        "    ),",
        "    spec=spec,",
        *(
            ["    names={", *(f"        {pair}," for pair in _pairs(structure.names)), "    },"]
            if structure.names
            else []
        ),
        ")",
    ]
    return "\n".join(lines) + "\n"


def _fields(structure: Structure, defaults: Mapping[str, Any]) -> tuple[list[tuple[str, str, str, str]], list[str]]:
    """Returns (name, type, default, description) of the config's own fields, and the settings as source."""
    fields = [(key.ours, key.annotation, key.default, _TEXTS[key.ours]) for key in structure.keys.values()]
    settings = [f'Setting("{key.ours}", ("{name}",), {key.default})' for name, key in structure.keys.items()]
    biases = (("attention_bias", structure.bias, "attention"), ("mlp_bias", structure.mlp_bias, "feed-forward layers"))
    for ours, key, label in biases:
        if key:
            fields.append((ours, "bool", "False", f"adds biases to the projections of {label}."))
            settings.append(f'Setting("{ours}", ("{key}",), False)')
    if structure.window:
        fields.append(("window", "PositiveInt", "4096", "size of the attention window in tokens, the query included."))
        fields.append(("local_layers", "tuple[bool, ...]", "()", "whether each layer has the window."))
        settings.append('Setting("window", ("sliding_window",), 4096)')
    if structure.nope:
        fields.append(("rope_layers", "tuple[int, ...]", "()", "1 for layers with rotary positions, else 0."))
        settings.append('Setting("rope_layers", ("no_rope_layers",))')
    defaults = {**defaults, "tie_word_embeddings": True} if structure.tied else defaults
    for setting in COMMON:
        value = next((defaults[name] for name in setting.names if name in defaults), setting.default)
        if value is not None and value != setting.default:
            resolved = f', "{setting.resolved}"' if setting.resolved else ""
            settings.append(f'Setting("{setting.ours}", ("{setting.names[0]}",), {value!r}{resolved})')
    return fields, settings


def _spec(config: str, structure: Structure) -> list[str]:
    bias = _bias(structure.bias, "attention_bias")
    # Without a key, only queries, keys and values have biases, as in Qwen2, unless the output also has a bias.
    biased = ("bias", "output_bias") if structure.output_bias else ("bias",)
    attention = {**structure.attention, **{name: bias for name in biased if bias}}
    attention |= _merged(structure.keys, "attention")
    if structure.window:
        attention["window"] = "config.window if config.local_layers[number] else None"
    if structure.nope:
        attention["**"] = '({} if config.rope_layers[number] else {"rope": None})'
    feed_forward = {"width": "config.mlp"}
    if structure.activation != "silu" or not structure.gated:
        feed_forward["activation"] = json.dumps(structure.activation)
    mlp_bias = _bias(structure.mlp_bias, "mlp_bias")
    if mlp_bias or not structure.gated:
        # A plain layer has biases by default.
        feed_forward["bias"] = mlp_bias or "False"
    kind = "Gated" if structure.gated else "Plain"
    layer = {"attention": "attention", "feed_forward": f"{kind}({', '.join(_arguments(feed_forward))})"}
    layer |= {name: str(value) for name, value in structure.layer.items()} | _merged(structure.keys, "layer")
    spec = {"layers": "tuple(map(layer, range(config.layers)))", "norm": "Norm(epsilon=config.norm_epsilon)"}
    return [
        f"def spec(config: {config}) -> DecoderSpec:",
        "    def layer(number: int) -> Layer:",
        "        attention = config.attention(",
        *(f"            {each}," for each in _arguments(attention)),
        "        )",
        "        return Layer(",
        *(f"            {each}," for each in _arguments(layer)),
        "        )",
        "",
        "    return DecoderSpec(",
        *(f"        {each}," for each in _arguments(spec | _merged(structure.keys, "spec"))),
        "    )",
        "",
        "",
    ]


def _converters(structure: Structure, defaults: Mapping[str, Any]) -> list[str]:
    """Returns functions that convert settings without a one-to-one key; empty if every setting maps to one key."""
    if not (structure.kinds or structure.nope):
        return []
    lines = ["def _read(reader: Reader) -> dict[str, Any]:"]
    if structure.nope:
        lines.append('    reader.get("no_rope_layer_interval")  # repeats no_rope_layers')
    if not structure.window:
        layers = f'reader.get("num_hidden_layers", default={defaults.get("num_hidden_layers", 32)})'
        return [
            *lines,
            f'    reader.expect_layers(["full_attention"] * {layers})',
            "    return read_rope(reader)",
            "",
            "",
        ]
    return [
        *lines,
        '    kinds = reader.get("layer_types") or []',
        '    return {**read_rope(reader), "local_layers": tuple(kind == "sliding_attention" for kind in kinds)}',
        "",
        "",
        "def _write(config: Any) -> dict[str, Any]:",
        '    kinds = ("full_attention", "sliding_attention")',
        '    return {**write_rope(config), "layer_types": [kinds[is_local] for is_local in config.local_layers]}',
        "",
        "",
    ]


def _bias(key: str | None, field: str) -> str:
    """Returns the expression for a bias: the config field, True for a bias without a key, or "" without a bias."""
    if key is None:
        return ""
    return f"config.{field}" if key else "True"


def _merged(keys: Mapping[str, Key], part: str) -> dict[str, str]:
    return {name: value for key in keys.values() for name, value in getattr(key, part).items()}


def _arguments(values: Mapping[str, str]) -> list[str]:
    return [f"**{value}" if name == "**" else f"{name}={value}" for name, value in values.items()]


def _pairs(values: Mapping[str, Any]) -> list[str]:
    return [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]


def _dict(values: Mapping[str, Any]) -> str:
    return "{" + ", ".join(_pairs(values)) + "}"
