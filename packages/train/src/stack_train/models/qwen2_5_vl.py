"""Qwen2.5-VL: a Qwen2 with images of any size, whose tokens have positions in two directions.

Outputs match transformers' `Qwen2_5_VLForConditionalGeneration` on texts and images; videos are not supported.

Source: Qwen Team, Qwen2.5-VL Technical Report, 2025 (arXiv:2502.13923), section 2.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.qwen_vl import QwenConfigMap, QwenVLFamily, QwenVLSettings, read_sections, write_sections
from stack_train.models.reader import COMMON, ConfigMap, Reader, Setting
from stack_train.nn.axial_rope import SectionedRope
from stack_train.nn.residual import Norm
from stack_train.vision.qwen2_5_tower import (
    Qwen25Tower,
    Qwen25TowerConfig,
    qwen2_5_tower_rules,
    read_qwen2_5_tower,
    write_qwen2_5_tower,
)

__all__ = ["FAMILY", "Qwen25VLConfig"]

_NAME, _ARCHITECTURE = "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"


@config
class Qwen25VLConfig(QwenVLSettings):
    """Size and numerics of a Qwen2.5-VL; inherits the fields of `QwenVLSettings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["qwen2_5_vl"] = "qwen2_5_vl"
    rope_sections: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] = (8, 12, 12)
    vision: Qwen25TowerConfig = Field(default_factory=Qwen25TowerConfig)
    min_pixels: PositiveInt = 3136
    max_pixels: PositiveInt = 12_845_056

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads * self.head_size != self.embed:
            raise ConfigError(
                f"heads={self.heads} of {self.head_size} features are not embed={self.embed}, as in every {_NAME}. "
                "Remove head_dim, or change one of them."
            )


def _spec(config: Qwen25VLConfig) -> DecoderSpec:
    rope = SectionedRope(theta=config.rope_theta, scaling=config.rope_scaling, sections=config.rope_sections)
    attention = config.attention(bias=True, rope=rope)
    layers = [Layer(attention=attention, feed_forward=config.feed_forward(number)) for number in range(config.layers)]
    return DecoderSpec(layers=tuple(layers), norm=Norm(epsilon=config.norm_epsilon))


class _NestingConfigMap(QwenConfigMap):
    """Mapping of a `config.json` that may have the keys of the `text_config` at its top level, like published files."""

    def read(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        if "text_config" not in mapping:
            outer = {key: mapping[key] for key in mapping if key in ("vision_config", "tie_word_embeddings")}
            outer |= {key: mapping[key] for key in mapping if key.endswith("_token_id") and key not in _TEXT_TOKENS}
            mapping = {**outer, "text_config": {key: mapping[key] for key in mapping if key not in outer}}
        return super().read(mapping)

    def tied_default(self, text: Mapping[str, Any]) -> bool:
        return bool(text.get("tie_word_embeddings"))


_TEXT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def _read_text(reader: Reader) -> dict[str, Any]:
    # The window acts in no layer unless this key is set.
    reader.get("sliding_window", "max_window_layers")
    if reader.get("use_sliding_window"):
        reader.problems.append("use_sliding_window=True, not False")
    reader.expect_layers(["full_attention"] * reader.get("num_hidden_layers", default=80))
    reader.expect("head_dim", reader.get("hidden_size", default=8192) // reader.get("num_attention_heads", default=64))
    rope = reader.get("rope_parameters", "rope_scaling") or {}
    if rope.get("mrope_interleaved"):
        reader.problems.append("mrope_interleaved=True, not False")
    return read_sections(reader, theta=1e6, default=(16, 24, 24))


_TEXT = ConfigMap(
    architecture=_ARCHITECTURE,
    model_type=f"{_NAME}_text",
    settings=(
        Setting("vocab_size", ("vocab_size",), 152_064),
        Setting("embed", ("hidden_size",), 8192),
        Setting("mlp", ("intermediate_size",), 29_568),
        Setting("layers", ("num_hidden_layers",), 80),
        Setting("heads", ("num_attention_heads",), 64),
        Setting("kv_heads", ("num_key_value_heads",), 8, "kv_head_count"),
        Setting("max_positions", ("max_position_embeddings",), 32_768),
        Setting("norm_epsilon", ("rms_norm_eps",), 1e-5),
    ),
    common=tuple(each for each in COMMON if each.ours != "head_dim"),
    fixed={"hidden_act": "silu"},
    read_others=_read_text,
    write_others=write_sections,
)
_SHARED: dict[str, Any] = {
    "name": _NAME,
    "config_class": Qwen25VLConfig,
    "spec": _spec,
    "sizes": ("3B", "7B", "32B", "72B"),
    "tested": ("logits", "greedy", "gradients", "conversion", "pages"),
}


class _Qwen25VLFamily(QwenVLFamily):
    def published_name(self, tensor: str) -> str:
        """Returns the published name of a tensor in layouts that releases of transformers have written since."""
        name = tensor.removeprefix("model.")
        if name.startswith("language_model."):
            return f"model.{name.removeprefix('language_model.')}"
        return name if name.startswith("visual.") else tensor


FAMILY = _Qwen25VLFamily(
    config_map=_NestingConfigMap(
        architecture=_ARCHITECTURE,
        model_type=_NAME,
        text=_TEXT,
        tower_reader=read_qwen2_5_tower,
        tower_writer=write_qwen2_5_tower,
    ),
    text=DecoderFamily(config_map=_TEXT, **_SHARED),
    tower=Qwen25Tower,
    tower_rules=qwen2_5_tower_rules,
    text_prefix="model.",
    tower_prefix="visual.",
    processor_class="Qwen2_5_VLProcessor",
    **_SHARED,
)
