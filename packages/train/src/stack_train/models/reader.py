"""Conversion between model configs and Hugging Face `config.json` files of transformers 4 and 5."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from stack_core import ops
from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError, ConversionError, nearest
from stack_train.models.harmless_keys import HARMLESS_KEYS

__all__ = [
    "COMMON",
    "ConfigMap",
    "Reader",
    "Setting",
    "periodic",
    "read_rope",
    "read_rotary_share",
    "unsupported",
    "write_rope",
]

_SCALINGS = {
    "linear": ops.LinearScaling,
    "dynamic": ops.DynamicScaling,
    "llama3": ops.Llama3Scaling,
    "yarn": ops.YarnScaling,
    "longrope": ops.LongRopeScaling,
    "su": ops.LongRopeScaling,  # former name
    "proportional": ops.ProportionalScaling,
}


class Reader:
    """A `config.json` that tracks which keys were read, to prevent silently ignored keys.

    Attributes:
      problems: unsupported settings, as "key=value" with the supported value.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        self._mapping = mapping
        self._unread = set(mapping) - HARMLESS_KEYS

    def get(self, *names: str, default: Any = None) -> Any:
        """Returns the first non-null value among several spellings of a key.

        Returns None if all present spellings are null, and `default` if no spelling is present.
        """
        self._unread -= set(names)
        found = [self._mapping[name] for name in names if name in self._mapping]
        return next((value for value in found if value is not None), None if found else default)

    def expect(self, name: str, value: Any) -> None:
        """Reads a key for which the model supports only one value."""
        given = self._mapping.get(name, value)
        self._unread.discard(name)
        if given != value:
            self.problems.append(f"{name}={given!r}, not {value!r}")

    def expect_layers(self, kinds: Sequence[str]) -> None:
        """Reads `layer_types`, which must be absent or match `kinds`, derived from other settings."""
        given = self.get("layer_types")
        if given is not None and given != list(kinds):
            self.problems.append(f"layer_types={given!r}, not {list(kinds)!r}")

    def unread(self) -> list[str]:
        """Returns the unread keys as "key=value", except for null, false, 0 and empty values."""
        return [f"{name}={value!r}" for name, value in self._mapping.items() if name in self._unread and value]


@dataclass(frozen=True)
class Setting:
    """A setting with the same value in our config and in `config.json`.

    Attributes:
      ours: name of the field in our config.
      names: all spellings in `config.json`; the first is written.
      default: value that transformers assumes if the key is missing.
      resolved: property of our config with the effective value, for fields that may be None.
    """

    ours: str
    names: tuple[str, ...]
    default: Any = None
    resolved: str | None = None


_IGNORE = (
    "To ignore a key that does not change what the model computes: stack convert hf:DIR RUN --ignore KEY, and use RUN."
)


def unsupported(architecture: str, settings: Sequence[str], *, has_unread: bool) -> ConversionError:
    """Returns the error for settings of a config.json that a family does not implement.

    Args:
      architecture: architecture of the checkpoint.
      settings: the settings, with their values.
      has_unread: True if a key without a known meaning is among them, which `--ignore` removes.
    """
    advice = f" {_IGNORE}" if has_unread else ""
    return ConversionError(
        f"The config.json of {architecture} has settings that this model does not implement: {'; '.join(settings)}."
        f"{advice}"
    )


COMMON = (
    Setting("vocab_size", ("vocab_size",), 32_000),
    Setting("embed", ("hidden_size",), 4096),
    Setting("layers", ("num_hidden_layers",), 32),
    Setting("heads", ("num_attention_heads",), 32),
    Setting("kv_heads", ("num_key_value_heads",), None, "kv_head_count"),
    Setting("head_dim", ("head_dim",), None, "head_size"),
    Setting("mlp", ("intermediate_size",), 11_008),
    Setting("max_positions", ("max_position_embeddings",), 2048),
    Setting("norm_epsilon", ("rms_norm_eps",), 1e-6),
    Setting("tie_embeddings", ("tie_word_embeddings",), False),
    Setting("initializer_std", ("initializer_range",), 0.02),
)
"""Settings of all decoders; a family's settings of the same name override them."""


def periodic(layers: int, period: int) -> list[str]:
    """Returns the `layer_types` of a decoder with a sliding window in all but every `period`-th layer."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def read_rope(
    reader: Reader,
    *,
    theta: float = 10_000.0,
    kind: str | None = None,
    original: int | None = None,
    handled: Collection[str] = (),
    unscaled: Collection[str] = (),
) -> dict[str, Any]:
    """Reads `rope_theta` and `rope_scaling`, from transformers 5's `rope_parameters` or the keys of transformers 4.

    Args:
      reader: the `config.json`.
      theta: default of transformers for `rope_theta`.
      kind: kind of layer whose entry is read if `rope_parameters` has one per kind.
      original: pretrained context length for scalings without `original_max_position_embeddings`.
      handled: keys of `rope_parameters` that the caller reads.
      unscaled: kinds of rotary positions without a scaling, besides "default".
    """
    nested = reader.get("rope_parameters") or {}
    # One entry for each kind of layer, or one for all.
    rope = {**(reader.get("rope_scaling") or {}), **nested.get(kind, nested)}
    outer = reader.get("rope_theta")
    found = rope.pop("rope_theta", None) or outer or theta
    # Older files have `type` instead of `rope_type`.
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    rope_type = "default" if rope_type in unscaled else rope_type
    share = None if rope_type == "proportional" else rope.pop("partial_rotary_factor", None)
    if "partial_rotary_factor" not in handled and share not in (None, 1.0):
        reader.problems.append(f"partial_rotary_factor={share}, not 1.0")
    rope = {name: value for name, value in rope.items() if value is not None and name not in handled}
    positions = reader.get("max_position_embeddings")
    return {"rope_theta": float(found), "rope_scaling": _scaling(rope_type, rope, positions, original)}


def read_rotary_share(reader: Reader, default: float) -> float:
    """Reads `partial_rotary_factor`, the fraction of a head's features with rotary positions, which may be nested."""
    nested, outer = reader.get("rope_parameters", "rope_scaling") or {}, reader.get("partial_rotary_factor")
    return float(nested.get("partial_rotary_factor") or outer or default)


def _scaling(rope_type: str, rope: dict[str, Any], positions: int | None, original: int | None) -> Any:
    if rope_type == "default":
        return None
    if rope_type not in _SCALINGS:
        raise ConversionError(
            f"rope_type {rope_type!r} is not supported.{nearest(rope_type, _SCALINGS)} "
            f"Supported: default, {', '.join(_SCALINGS)}."
        )
    # In transformers, dynamic scaling starts from max_position_embeddings.
    if rope_type == "dynamic":
        rope = {"factor": rope.get("factor"), "max_position_embeddings": positions}
    elif rope_type not in ("linear", "proportional"):
        original = rope.setdefault("original_max_position_embeddings", original or positions)
        # transformers derives a missing factor from the two lengths.
        if rope_type != "llama3" and original:
            rope.setdefault("factor", (positions or original) / original)
    try:
        return parse(_SCALINGS[rope_type], rope, path="rope_scaling")
    except ConfigError as error:
        raise ConversionError(str(error)) from error


def write_rope(config: Any) -> dict[str, Any]:
    """Returns the keys of transformers 4, which transformers 5 also reads, without fields that have default values."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    kept = [each.name for each in fields(scaling) if getattr(scaling, each.name) != each.default]
    mapping = {"rope_type": scaling.rope_type, **{name: to_mapping(getattr(scaling, name)) for name in kept}}
    if mapping["rope_type"] == "dynamic" and mapping.pop("max_position_embeddings") != config.max_positions:
        raise ConversionError(
            "Dynamic rope scaling starts from max_position_embeddings="
            f"{scaling.max_position_embeddings}, but max_positions is {config.max_positions}; "
            "a Hugging Face config.json has one value for both. Make them equal."
        )
    return {"rope_theta": config.rope_theta, "rope_scaling": mapping}


@dataclass(frozen=True, kw_only=True)
class ConfigMap:
    """Mapping between our config and the `config.json` of one architecture.

    Attributes:
      architecture: name in `architectures`.
      model_type: value of `model_type`.
      settings: settings that correspond one to one, in addition to `common`.
      common: settings of all models of a kind; `settings` takes precedence.
      fixed: keys for which the model supports only one value.
      silent: keys without an effect on the model's outputs, in addition to `HARMLESS_KEYS`.
      read_others, write_others: conversion of the settings that do not correspond one to one.
    """

    architecture: str
    model_type: str
    settings: tuple[Setting, ...] = ()
    common: tuple[Setting, ...] = COMMON
    fixed: Mapping[str, Any] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    read_others: Callable[[Reader], dict[str, Any]] = read_rope
    write_others: Callable[[Any], dict[str, Any]] = write_rope

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Converts a `config.json` to fields of our config.

        Raises:
          ConversionError: the model does not support a setting, or a key is unknown; the message lists every problem.
        """
        reader = Reader(mapping)
        # Marks these keys as read.
        reader.get(*self.silent)
        for name, value in self.fixed.items():
            reader.expect(name, value)
        found = {setting.ours: reader.get(*setting.names, default=setting.default) for setting in self._settings}
        try:
            found |= self.read_others(reader)
        except ConversionError as error:
            raise ConversionError(f"{self.architecture}: {error}") from error
        if wrong := [*reader.problems, *reader.unread()]:
            raise unsupported(self.architecture, wrong, has_unread=bool(reader.unread()))
        return found

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config, in a form that both transformers 4 and 5 read."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{each.names[0]: getattr(config, each.resolved or each.ours) for each in self._settings},
            **self.fixed,
            **self.write_others(config),
            "torch_dtype": config.param_dtype,
        }

    @property
    def _settings(self) -> tuple[Setting, ...]:
        return tuple({setting.ours: setting for setting in (*self.common, *self.settings)}.values())
