"""Conversion of the settings of a GGUF file to a model config."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stack_core import ops
from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, ConversionError
from stack_core.abi.plugins import registries
from stack_train.gguf.blocks import dequantize
from stack_train.gguf.library import library
from stack_train.gguf.names import ARCHITECTURES, ROPE_FREQUENCIES, Architecture

__all__ = ["config_of", "rope_factors"]

_NEEDED = (
    "attention.head_count",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "context_length",
    "attention.layer_norm_rms_epsilon",
)

_READ = (
    *_NEEDED,
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "vocab_size",
)


def config_of(settings: Mapping[str, Any], tensors: Mapping[str, Any], path: Path) -> tuple[Any, Architecture]:
    """Converts the settings of a file to a model config."""
    name = settings.get("general.architecture")
    # Mixtral has the name of Llama's architecture and differs by its experts.
    mixes = bool(settings.get(f"{name}.expert_count"))
    families = (family for family, each in ARCHITECTURES.items() if (each.name, each.has_experts) == (name, mixes))
    if (family := next(families, None)) is None:
        known = sorted({each.name for each in ARCHITECTURES.values()})
        raise ConversionError(
            f"{path} is of architecture {name!r}; these are read: {', '.join(known)}. "
            "If `stack models` lists its family, open its Hugging Face checkpoint instead (hf:DIR)."
        )
    own = {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
    own = {key: value for key, value in own.items() if value or key in _NEEDED}  # expert_count may be 0
    of_family = ARCHITECTURES[family].settings
    _check_settings(own, tuple(of_family.values()), path)
    heads, embed = own["attention.head_count"], own["embedding_length"]
    mapping = {
        "name": family,
        # A file without a tokenizer has the setting only.
        "vocab_size": len(settings.get("tokenizer.ggml.tokens", ())) or own.get("vocab_size"),
        "embed": embed,
        "layers": own["block_count"],
        "heads": heads,
        "kv_heads": own.get("attention.head_count_kv", heads),
        "head_dim": own.get("attention.key_length", embed // heads),
        "mlp": own["feed_forward_length"],
        "max_positions": own["context_length"],
        # The shortest decimal of the float32, which is the number in `config.json`: 1e-05 instead of 9.99999974e-06.
        "norm_epsilon": float(np.format_float_positional(np.float32(own["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": float(own.get("rope.freq_base", 10_000.0)),
        "tie_embeddings": "output.weight" not in tensors,
        "dtype": "float32",
        "param_dtype": "float32",
        **{field: own[key] for field, key in of_family.items()},
        **({"query_scalar": own.get("attention.key_length", embed // heads)} if family == "gemma3" else {}),
    }
    if own.get("rope.scaling.type", "none") == "linear":
        mapping["rope_scaling"] = {"rope_type": "linear", "factor": float(own["rope.scaling.factor"])}
    try:
        config = parse(registries.models[family].config_class, mapping)
        if ROPE_FREQUENCIES in tensors:
            factors = dequantize(library(), tensors[ROPE_FREQUENCIES])
            config = replace(config, rope_scaling=_llama3_scaling(config, factors, path))
    except ConfigError as error:
        raise ConversionError(f"{path} describes no valid {family}: {error}") from error
    return config, ARCHITECTURES[family]


def rope_factors(scaling: ops.Llama3Scaling, config: Any) -> np.ndarray:
    """Returns the divisors of the rotary frequencies, float32[head_dim / 2]."""
    plain = config.rope_theta ** -(np.arange(0, config.head_size, 2) / config.head_size)
    with jax.ensure_compile_time_eval():
        scaled, _ = scaling.frequencies(config.rope_theta, config.head_size, jnp.zeros((1, 1), jnp.int32))
    return (plain / np.asarray(scaled, np.float64)).astype(np.float32)


def _check_settings(settings: Mapping[str, Any], of_family: Sequence[str], path: Path) -> None:
    """Raises a ConversionError if a setting is missing, unknown or not supported by the models."""
    known = (*_READ, *of_family)
    wrong = [f"{key} is missing" for key in (*_NEEDED, *of_family) if key not in settings]
    wrong += [f"{key}={value!r} is not read" for key, value in settings.items() if key not in known]
    if settings.get("rope.scaling.type", "none") not in ("none", "linear"):
        wrong.append(f"rope.scaling.type={settings['rope.scaling.type']!r}, not linear")
    for key in ("attention.value_length", "rope.dimension_count"):
        head_dim = settings.get("attention.key_length", settings.get(key))
        if settings.get(key, head_dim) != head_dim:
            wrong.append(f"{key}={settings[key]}, not the key_length {head_dim}")
    if wrong:
        raise ConversionError(f"{path} has settings that are not read here: {'; '.join(wrong)}.")


def _llama3_scaling(config: Any, factors: np.ndarray, path: Path) -> ops.Llama3Scaling:
    """Returns the RoPE scaling with these divisors, among the scalings of the published Llama 3 models.

    Raises:
      ConversionError: the divisors belong to no such scaling.
    """
    # The largest divisor is the factor if some frequency is low enough; otherwise a published factor may match.
    for factor in sorted({float(np.max(factors)), 8.0, 32.0}):
        scaling = ops.Llama3Scaling(
            factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
        )
        if np.allclose(rope_factors(scaling, config), factors, rtol=1e-4):
            return scaling
    raise ConversionError(
        f"{path} divides frequencies by {ROPE_FREQUENCIES} of its own; those of Llama 3.1 to 3.3 are read."
    )
