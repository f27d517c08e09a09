"""How a model's config and its Hugging Face `config.json` say the same."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from stack_core import ops
from stack_core.config import parse, to_mapping
from stack_core.errors import ConfigError, ConversionError, nearest

__all__ = ["ConfigField", "ConfigMap"]

_SCALINGS = {
    "linear": ops.LinearScaling,
    "dynamic": ops.DynamicScaling,
    "llama3": ops.Llama3Scaling,
    "yarn": ops.YarnScaling,
    "longrope": ops.LongRopeScaling,
}
_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")
# What these keys say is how a model is trained, stored or sampled from, not what it computes.
_SILENT_KEYS = frozenset(
    {
        "architectures",
        "model_type",
        "transformers_version",
        "_name_or_path",
        "dtype",
        "torch_dtype",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "max_length",
        "attention_dropout",
        "return_dict",
        "id2label",
        "label2id",
    }
)


@dataclass(frozen=True)
class ConfigField:
    """One setting under its two names.

    Attributes:
      default: what transformers takes where `config.json` leaves it out.
      resolved: the property of our config that has the value where the field may be None.
    """

    theirs: str
    ours: str
    default: Any
    resolved: str | None = None


@dataclass(frozen=True)
class ConfigMap:
    """The settings of one architecture.

    Attributes:
      architecture: the name in `architectures`.
      fields: settings that both have.
      fixed: keys of which the model can do one value only.
      rope_theta: transformers' default.
    """

    architecture: str
    model_type: str
    fields: tuple[ConfigField, ...]
    fixed: Mapping[str, Any]
    rope_theta: float = 10_000.0

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of our config that a `config.json` gives, with `rope_theta` and `rope_scaling`.

        Raises:
          ConversionError: it asks for what the model cannot do; names each key and value.
        """
        known = {field.theirs for field in self.fields} | {*self.fixed, *_ROPE_KEYS, *_SILENT_KEYS}
        wrong = [
            f"{key}={mapping[key]!r}, not {value!r}"
            for key, value in self.fixed.items()
            if mapping.get(key, value) != value
        ]
        wrong += [
            f"{key}={value!r}" for key, value in mapping.items() if key not in known and value not in (None, False)
        ]
        if wrong:
            raise ConversionError(
                f"{self.architecture} asks in its config.json for what this model does not do: {'; '.join(wrong)}."
            )
        fields = {field.ours: mapping.get(field.theirs, field.default) for field in self.fields}
        theta, scaling = self._read_rope(mapping)
        return {**fields, "rope_theta": theta, "rope_scaling": scaling}

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config, in the form that transformers 4 and 5 both read."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **{field.theirs: getattr(config, field.resolved or field.ours) for field in self.fields},
            **self.fixed,
            "rope_theta": config.rope_theta,
            "rope_scaling": _written_scaling(config),
            "torch_dtype": config.param_dtype,
        }

    def _read_rope(self, mapping: Mapping[str, Any]) -> tuple[float, Any]:
        """Returns theta and the scaling, from transformers 5's `rope_parameters` or the two keys it replaced."""
        rope = {**(mapping.get("rope_scaling") or {}), **(mapping.get("rope_parameters") or {})}
        theta = rope.pop("rope_theta", None) or mapping.get("rope_theta") or self.rope_theta
        legacy_type = rope.pop("type", "default")
        rope_type = rope.pop("rope_type", legacy_type)
        rope = {key: value for key, value in rope.items() if value is not None}
        if rope.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ConversionError(f"{self.architecture}: partial_rotary_factor is not supported; only 1.0 is.")
        if rope_type == "default":
            return float(theta), None
        if rope_type not in _SCALINGS:
            raise ConversionError(
                f"{self.architecture}: rope_type {rope_type!r} is not supported.{nearest(rope_type, _SCALINGS)} "
                f"Supported: default, {', '.join(_SCALINGS)}."
            )
        positions = mapping.get("max_position_embeddings")
        if rope_type == "dynamic":
            rope = {"factor": rope.get("factor"), "max_position_embeddings": positions}
        elif rope_type != "linear":
            original = rope.setdefault("original_max_position_embeddings", positions)
            if rope_type != "llama3" and original:
                rope.setdefault("factor", (positions or original) / original)
        try:
            return float(theta), parse(_SCALINGS[rope_type], rope, path="rope_scaling")
        except ConfigError as error:
            raise ConversionError(f"{self.architecture}: {error}") from error


def _written_scaling(config: Any) -> dict[str, Any] | None:
    """Returns the scaling under transformers' names; what has its default is left out, as transformers has the same."""
    scaling = config.rope_scaling
    if scaling is None:
        return None
    kept = [field.name for field in fields(scaling) if getattr(scaling, field.name) != field.default]
    mapping = {"rope_type": scaling.rope_type, **{name: to_mapping(getattr(scaling, name)) for name in kept}}
    if mapping["rope_type"] == "dynamic" and mapping.pop("max_position_embeddings") != config.max_positions:
        raise ConversionError(
            "Dynamic rope scaling starts from max_position_embeddings="
            f"{scaling.max_position_embeddings}, but max_positions is {config.max_positions}; "
            "a Hugging Face config.json has one number for both. Make them equal."
        )
    return mapping
