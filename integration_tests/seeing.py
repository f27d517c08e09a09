"""Tiny language models with images and a tokenizer of words, for tests."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stack_core.abi.plugins import registries
from stack_train.models.gemma3_vision import Gemma3VisionConfig
from stack_train.models.gemma4_vision import Gemma4VisionConfig
from stack_train.models.mistral3 import Mistral3Config
from stack_train.models.qwen2_5_vl import Qwen25VLConfig
from stack_train.models.qwen3_vl import Qwen3VLConfig
from stack_train.vision.gemma4_tower import Gemma4TowerConfig
from stack_train.vision.pixtral_tower import PixtralTowerConfig
from stack_train.vision.qwen2_5_tower import Qwen25TowerConfig
from stack_train.vision.qwen_tower import QwenTowerConfig
from stack_train.vision.siglip import SiglipConfig

WORDS = ["<pad>", "<bos>", "<eos>", "<img>", "<pix>", "</img>", "user", "model", "?", "!"]
COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 60, 220), "white": (240, 240, 240)}
SHAPES = ["square", "circle", "triangle"]
QUESTIONS = ["which", "color", "shape", "is", "it", "and"]
SIZES = {
    "vocab_size": len(WORDS) + 1 + len(QUESTIONS) + len(COLORS) + len(SHAPES),
    "embed": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "mlp": 64,
    "dtype": "float32",
}
TEMPLATE = """{% for message in messages %}{{ message.role + ' ' }}{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}<img> {% else %}{{ part.text + ' ' }}{% endif %}{% endfor %}{% endif %}{% if message.role == 'assistant' %} <eos>{% endif %} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"""  # noqa: E501
TEMPLATE = TEMPLATE.strip()


# Words separate the tokens of two images.
GRID_TEMPLATE = TEMPLATE.replace("<img> ", "! <pix> ? ")


def write_tokenizer(directory: Path, template: str = TEMPLATE) -> None:
    """Writes a tokenizer of words, with the tokens of images and a chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    words = [*WORDS, "assistant", *QUESTIONS, *COLORS, *SHAPES]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens(WORDS[:6])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))


def make_config(**changes: Any) -> Gemma3VisionConfig:
    fields: dict[str, Any] = {
        **SIZES,
        "layers": 2,
        "period": 2,
        "window": 6,
        "max_positions": 96,
        "query_scalar": 8,
        "tie_embeddings": False,
        "image_begin": 3,
        "image_token": 4,
        "image_end": 5,
        "image_tokens": 4,
        "vision": SiglipConfig(embed=24, heads=2, mlp=48, layers=1, image_size=24, patch=6),
    }
    return Gemma3VisionConfig(**{**fields, **changes})


def make_grid_config(kind: Any = Qwen3VLConfig, **changes: Any) -> Any:
    """Returns the config of a Qwen-VL, by default Qwen3-VL, whose images have up to 16 tokens."""
    fields: dict[str, Any] = {
        **SIZES,
        "rope_sections": (2, 1, 1),
        "layers": 1,
        "max_positions": 96,
        "image_token": 4,
        "min_pixels": 36,
        "max_pixels": 36 * 16,
        "vision": QwenTowerConfig(embed=24, heads=2, mlp=48, layers=1, patch=3, position_side=3, deepstack=(0,)),
    }
    return kind(**{**fields, **changes})


def make_windowed_config(**changes: Any) -> Qwen25VLConfig:
    """Returns the config of a Qwen2.5-VL with a layer of windows in its tower."""
    tower = Qwen25TowerConfig(embed=24, heads=2, mlp=48, layers=2, patch=3, window=12, full_layers=(1,))
    return make_grid_config(Qwen25VLConfig, **{"vision": tower, **changes})


def make_row_config(**changes: Any) -> Mistral3Config:
    """Returns the config of a Mistral 3, whose images have a token of text after each row: "?", and "!" at the end."""
    fields: dict[str, Any] = {
        **SIZES,
        "layers": 1,
        "max_positions": 96,
        "image_token": 4,
        "image_break": " ? ",
        "image_end": " ! ",
        "longest_edge": 24,
        "vision": PixtralTowerConfig(embed=24, heads=2, mlp=48, layers=1, patch=3),
    }
    return Mistral3Config(**{**fields, **changes})


def make_gemma4_config(**changes: Any) -> Gemma4VisionConfig:
    """Returns the config of a Gemma 4, whose images have up to 70 tokens."""
    fields: dict[str, Any] = {
        **SIZES,
        "layers": 4,
        "global_layers": (1, 3),
        "shared_layers": 2,
        "per_layer_input": 6,
        "window": 6,
        "max_positions": 160,
        "image_begin": 3,
        "image_token": 4,
        "image_end": 5,
        "max_image_tokens": 70,
        "vision": Gemma4TowerConfig(embed=24, heads=2, head_dim=12, mlp=48, layers=1, patch=3, merge=2, positions=140),
    }
    return Gemma4VisionConfig(**{**fields, **changes})


def make_model(config: Any) -> Any:
    return jax.jit(lambda: registries.models[config.name].build(config, key=jax.random.key(0)))()


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def question(text: str, *images: bytes) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(each)}} for each in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
