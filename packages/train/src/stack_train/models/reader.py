"""How a model's config and its Hugging Face `config.json` say the same, in the spellings of transformers 4 and 5."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from stack_core import ops
from stack_core.abi.config import parse, to_mapping
from stack_core.abi.errors import ConfigError, ConversionError, nearest
from stack_train.models.harmless_keys import HARMLESS_KEYS

__all__ = ["COMMON", "ConfigMap", "Reader", "Setting", "alternating", "read_rope", "write_rope"]

_SCALINGS = {
    "linear": ops.LinearScaling,
    "dynamic": ops.DynamicScaling,
    "llama3": ops.Llama3Scaling,
    "yarn": ops.YarnScaling,
    "longrope": ops.LongRopeScaling,
}


class Reader:
    """A `config.json` that knows which of its keys were read, so that none is passed over in silence.

    Attributes:
      problems: what the model cannot do, "key=value" with what it can.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self.problems: list[str] = []
        self._mapping = mapping
        self._unread = set(mapping) - HARMLESS_KEYS

    def get(self, *names: str, default: Any = None) -> Any:
        """The value under the first of several spellings that is there and not null; `default` where none is there."""
        self._unread -= set(names)
        found = [self._mapping[name] for name in names if name in self._mapping]
        return next((value for value in found if value is not None), None if found else default)

    def expect(self, name: str, value: Any) -> None:
        """Reads a key of which the model can do one value only."""
        given = self._mapping.get(name, value)
        self._unread.discard(name)
        if given != value:
            self.problems.append(f"{name}={given!r}, not {value!r}")

    def expect_layers(self, kinds: Sequence[str]) -> None:
        """Reads `layer_types`, if they are there, of which the model can do those of its other settings only."""
        given = self.get("layer_types")
        if given is not None and given != list(kinds):
            self.problems.append(f"layer_types={given!r}, not {list(kinds)!r}")

    def unread(self) -> list[str]:
        """Returns the keys that were not read, as "key=value", but for null, false, 0 and empty ones."""
        return [f"{name}={value!r}" for name, value in self._mapping.items() if name in self._unread and value]


@dataclass(frozen=True)
class Setting:
    """One setting under its name in our config and its names in `config.json`.

    Attributes:
      names: all spellings; the first is written.
      default: what transformers takes where `config.json` leaves it out.
      resolved: the property of our config that has the value where the field may be None.
    """

    ours: str
    names: tuple[str, ...]
    default: Any = None
    resolved: str | None = None


_IGNORE = (
    "A key that does not change what the model computes can be left out of what is read: stack convert hf:DIR RUN "
    "--ignore KEY, and use RUN."
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
"""What all decoders have; a family's own settings with the same name go before them."""


def alternating(layers: int) -> list[str]:
    """The `layer_types` of a decoder whose first layer and every other one see a window."""
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)]


def read_rope(
    reader: Reader, *, theta: float = 10_000.0, kind: str | None = None, partial: bool = False
) -> dict[str, Any]:
    """Reads `rope_theta` and `rope_scaling`, from transformers 5's `rope_parameters` or the keys that it replaced.

    Args:
      theta: transformers' default.
      partial: the caller reads `partial_rotary_factor`, which otherwise has to be 1.
      kind: of layer; its entry of `rope_parameters` is read where that has one for each kind.
    """
    nested = reader.get("rope_parameters") or {}
    rope = {**(reader.get("rope_scaling") or {}), **nested.get(kind, nested)}
    found = rope.pop("rope_theta", None) or reader.get("rope_theta") or theta
    legacy_type = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", legacy_type)
    share = rope.pop("partial_rotary_factor", None)
    if not partial and share not in (None, 1.0):
        reader.problems.append(f"partial_rotary_factor={share}, not 1.0")
    rope = {name: value for name, value in rope.items() if value is not None}
    positions = reader.get("max_position_embeddings")
    return {"rope_theta": float(found), "rope_scaling": _scaling(rope_type, rope, positions)}


def _scaling(rope_type: str, rope: dict[str, Any], positions: int | None) -> Any:
    if rope_type == "default":
        return None
    if rope_type not in _SCALINGS:
        raise ConversionError(
            f"rope_type {rope_type!r} is not supported.{nearest(rope_type, _SCALINGS)} "
            f"Supported: default, {', '.join(_SCALINGS)}."
        )
    if rope_type == "dynamic":
        rope = {"factor": rope.get("factor"), "max_position_embeddings": positions}
    elif rope_type != "linear":
        original = rope.setdefault("original_max_position_embeddings", positions)
        if rope_type != "llama3" and original:
            rope.setdefault("factor", (positions or original) / original)
    try:
        return parse(_SCALINGS[rope_type], rope, path="rope_scaling")
    except ConfigError as error:
        raise ConversionError(str(error)) from error


def write_rope(config: Any) -> dict[str, Any]:
    """Returns the keys of transformers 4, which 5 reads too; a scaling's defaults are left out, as both have them."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    kept = [each.name for each in fields(scaling) if getattr(scaling, each.name) != each.default]
    mapping = {"rope_type": scaling.rope_type, **{name: to_mapping(getattr(scaling, name)) for name in kept}}
    if mapping["rope_type"] == "dynamic" and mapping.pop("max_position_embeddings") != config.max_positions:
        raise ConversionError(
            "Dynamic rope scaling starts from max_position_embeddings="
            f"{scaling.max_position_embeddings}, but max_positions is {config.max_positions}; "
            "a Hugging Face config.json has one number for both. Make them equal."
        )
    return {"rope_theta": config.rope_theta, "rope_scaling": mapping}


@dataclass(frozen=True, kw_only=True)
class ConfigMap:
    """The settings of one architecture.

    Attributes:
      architecture: the name in `architectures`.
      settings: those that our config and `config.json` have one for one, besides `COMMON`.
      fixed: keys of which the model can do one value only.
      silent: keys that do not change what the model computes, besides `HARMLESS_KEYS`.
      read_others, write_others: the settings that take more than a name.
    """

    architecture: str
    model_type: str
    settings: tuple[Setting, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    read_others: Callable[[Reader], dict[str, Any]] = read_rope
    write_others: Callable[[Any], dict[str, Any]] = write_rope

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of our config that a `config.json` gives.

        Raises:
          ConversionError: it asks for what the model cannot do; names each key and value.
        """
        reader = Reader(mapping)
        reader.get(*self.silent)
        for name, value in self.fixed.items():
            reader.expect(name, value)
        found = {setting.ours: reader.get(*setting.names, default=setting.default) for setting in self._settings}
        try:
            found |= self.read_others(reader)
        except ConversionError as error:
            raise ConversionError(f"{self.architecture}: {error}") from error
        if wrong := [*reader.problems, *reader.unread()]:
            advice = f" {_IGNORE}" if reader.unread() else ""
            raise ConversionError(
                f"{self.architecture} asks in its config.json for what this model does not do: {'; '.join(wrong)}."
                f"{advice}"
            )
        return found

    def write(self, config: Any) -> dict[str, Any]:
        """Returns the `config.json` of a config, in the form that transformers 4 and 5 both read."""
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
        return tuple({setting.ours: setting for setting in (*COMMON, *self.settings)}.values())
