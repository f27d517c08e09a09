"""Qwen3-VL: a Qwen3 with images of any size, whose tokens have positions in two directions.

Features of earlier layers of the tower are added to the outputs of the decoder's first layers (DeepStack). Outputs
match transformers' `Qwen3VLForConditionalGeneration` on texts and images; videos are not supported.

Source: Qwen Team, Qwen3-VL Technical Report, 2025 (arXiv:2511.21631), section 2.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_train.models.decoder import DecoderSpec, Layer
from stack_train.models.family import DecoderFamily
from stack_train.models.qwen_vl import QwenConfigMap, QwenVLFamily, QwenVLSettings, read_sections, write_sections
from stack_train.models.reader import ConfigMap, Reader, Setting
from stack_train.nn.axial_rope import InterleavedRope
from stack_train.nn.residual import Norm
from stack_train.vision.qwen_tower import (
    QwenTower,
    QwenTowerConfig,
    qwen_tower_rules,
    read_qwen_tower,
    write_qwen_tower,
)

__all__ = ["FAMILY", "Qwen3VLConfig", "Qwen3VLSettings", "spec", "vision_family"]


@config
class Qwen3VLSettings(QwenVLSettings):
    """Settings of a Qwen3-VL, dense or not; inherits the fields of `QwenVLSettings`.

    Attributes:
      attention_bias: adds biases to the projections of attention.
    """

    attention_bias: bool = False
    vision: QwenTowerConfig = Field(default_factory=QwenTowerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.vision.deepstack) > self.layers:
            raise ConfigError(
                f"vision.deepstack={list(self.vision.deepstack)} has features for {len(self.vision.deepstack)} layers, "
                f"and the decoder layers={self.layers}. Take out some."
            )


@config
class Qwen3VLConfig(Qwen3VLSettings):
    """Size and numerics of a Qwen3-VL; inherits the fields of `Qwen3VLSettings`.

    Attributes:
      name: selects this family.
    """

    name: Literal["qwen3_vl"] = "qwen3_vl"


def spec(config: Any) -> DecoderSpec:
    """Returns the architecture; the first layers add features of images to their outputs."""
    bias = config.attention_bias
    rope = InterleavedRope(theta=config.rope_theta, scaling=config.rope_scaling, sections=config.rope_sections)
    attention = config.attention(head_norms=True, bias=bias, output_bias=bias, rope=rope)
    deep = len(config.vision.deepstack)
    layers = [
        Layer(attention=attention, feed_forward=config.feed_forward(number), adds_features=number < deep)
        for number in range(config.layers)
    ]
    return DecoderSpec(layers=tuple(layers), norm=Norm(epsilon=config.norm_epsilon))


def _read_sections(reader: Reader) -> dict[str, Any]:
    rope = reader.get("rope_parameters", "rope_scaling") or {}
    if not rope.get("mrope_interleaved", True):
        reader.problems.append("mrope_interleaved=False, not True")
    return read_sections(reader, theta=500_000.0, default=(24, 20, 20))


def vision_family(
    name: str,
    architecture: str,
    config_class: type,
    settings: tuple[Setting, ...],
    *,
    fixed: Mapping[str, Any],
    **options: Any,
) -> QwenVLFamily:
    """Returns a family from the settings of its `text_config`; `options` are further fields of the family."""
    text = ConfigMap(
        architecture=architecture,
        model_type=f"{name}_text",
        settings=(
            Setting("vocab_size", ("vocab_size",), 151_936),
            Setting("max_positions", ("max_position_embeddings",), 128_000),
            Setting("attention_bias", ("attention_bias",), False),
            *settings,
        ),
        fixed={"hidden_act": "silu", **fixed},
        read_others=_read_sections,
        write_others=lambda config: write_sections(config, mrope_interleaved=True),
    )
    towers: dict[str, Any] = {"tower_reader": read_qwen_tower, "tower_writer": write_qwen_tower}
    shared: dict[str, Any] = {"name": name, "config_class": config_class, "spec": spec, **options}
    return QwenVLFamily(
        config_map=QwenConfigMap(architecture=architecture, model_type=name, text=text, **towers),
        text=DecoderFamily(config_map=text, **shared),
        tower=QwenTower,
        tower_rules=qwen_tower_rules,
        processor_class="Qwen3VLProcessor",
        **shared,
    )


FAMILY = vision_family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    Qwen3VLConfig,
    (
        Setting("mlp", ("intermediate_size",), 22_016),
        Setting("kv_heads", ("num_key_value_heads",), 32, "kv_head_count"),
        Setting("head_dim", ("head_dim",), 128, "head_size"),
    ),
    fixed={},
    sizes=("2B", "4B", "8B", "32B"),
    tested=("logits", "greedy", "gradients", "conversion", "pages"),
)
