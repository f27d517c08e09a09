"""Conversations with images: their tokens, pixels and errors."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ChatTemplateError, ConfigError, DataError
from stack_train.data.kinds.image_chat import ImageChatData
from stack_train.models.gemma3_vision import Gemma3VisionConfig
from stack_train.models.gemma4_vision import Gemma4VisionConfig
from stack_train.models.llama import LlamaConfig
from stack_train.models.mistral3 import Mistral3Config
from stack_train.models.qwen3_vl import Qwen3VLConfig
from stack_train.vision.gemma4_tower import Gemma4TowerConfig
from stack_train.vision.pixtral_tower import PixtralTowerConfig
from stack_train.vision.qwen_tower import QwenTowerConfig
from stack_train.vision.siglip import SiglipConfig

WORDS = ["<pad>", "<end>", "<image>", "<soft>", "</image>", "user", "assistant", "what", "red", "blue"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.content is string %}{{ m.content + ' ' }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image> {% else %}{{ p.text + ' ' }}{% endif %}{% endfor %}"
    "{% endif %}{% if m.role == 'assistant' %}<end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
MODEL = Gemma3VisionConfig(
    vocab_size=10,
    embed=8,
    heads=2,
    image_begin=2,
    image_token=3,
    image_end=4,
    image_tokens=4,
    vision=SiglipConfig(embed=8, heads=2, image_size=4, patch=2),
)


def png(color, size=(6, 3)):
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, format="PNG")
    return file.getvalue()


def image(url):
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*images, answer="red"):
    parts = [*map(image, images), {"type": "text", "text": "what"}]
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]


def data(tmp_path, *conversations, **fields):
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"eos_token": "<end>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    lines = [json.dumps({"messages": each}) for each in conversations]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "red.png").write_bytes(png((255, 0, 0)))
    settings = {"source": str(tmp_path / "*.jsonl"), "tokenizer": str(tmp_path), "validation_fraction": 0.0}
    return ImageChatData(**{**settings, "seq_tokens": 24, "batch_size": 1, "prefetch_batches": 0, **fields})


def batches(config):
    config.check(MODEL)
    return config.build(seed=0, model=MODEL)


def test_a_row_has_the_tokens_and_the_pixels_of_its_images(tmp_path):
    blue = f"data:image/png;base64,{base64.b64encode(png((0, 0, 255))).decode()}"
    config = data(tmp_path, chat("red.png", blue), chat(answer="blue"), row_images=2)
    batch = batches(config).train_batch(np.array([0]))
    assert {name: array.shape for name, array in batch.items()} == {
        name: struct.shape for name, struct in config.spec(MODEL).items()
    }
    tokens = [5, *[2, 3, 3, 3, 3, 4] * 2, 7, 6, 8]
    begin = batch["tokens"][0].tolist().index(2) - 1
    assert batch["tokens"][0, begin : begin + 16].tolist() == tokens
    targets = batch["targets"][0]
    assert sorted(targets[targets != IGNORED_TARGET].tolist()) == [1, 1, 8, 9]
    assert (batch["pixels"][0, 0] == (255, 0, 0)).all()
    assert (batch["pixels"][0, 1] == (0, 0, 255)).all()


def test_images_with_grids_are_packed(tmp_path):
    model = Qwen3VLConfig(
        vocab_size=10,
        embed=8,
        heads=2,
        rope_sections=(1, 1, 0),
        image_token=2,
        min_pixels=16,
        max_pixels=128,
        vision=QwenTowerConfig(embed=8, heads=2, patch=2),
    )
    config = data(tmp_path, chat("red.png", "blue.png", answer="red"), row_images=3)
    (tmp_path / "red.png").write_bytes(png((255, 0, 0), (8, 8)))
    (tmp_path / "blue.png").write_bytes(png((0, 0, 255), (12, 4)))
    config.check(model)
    found = config.build(seed=0, model=model)
    batch = found.train_batch(np.array([0]))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: (struct.shape, struct.dtype) for name, struct in config.spec(model).items()
    }
    assert batch["grids"].tolist() == [[[2, 2], [1, 3], [0, 0]]]
    assert batch["pixels"].shape == (1, 4 * 24, 12)
    tokens = batch["tokens"][0].tolist()
    begin = tokens.index(5)
    assert tokens[begin : begin + 11] == [5, 2, 2, 2, 2, 2, 2, 2, 7, 6, 8]
    targets = batch["targets"][0]
    assert sorted(targets[targets != IGNORED_TARGET].tolist()) == [1, 8]
    red, blue = batch["pixels"][0, :16].reshape(16, 3, 4), batch["pixels"][0, 16:28].reshape(12, 3, 4)
    assert (red.transpose(0, 2, 1) == (255, 0, 0)).all() and (blue.transpose(0, 2, 1) == (0, 0, 255)).all()
    assert not batch["pixels"][0, 28:].any()
    (tmp_path / "red.png").write_bytes(png((255, 0, 0), (8, 4)))
    with pytest.raises(DataError, match=r"chats\.jsonl:1: .*red\.png: The image has 2 tokens, and had 4 when"):
        found.train_batch(np.array([0]))
    (tmp_path / "blue.png").write_bytes(png((0, 0, 255), (500, 2)))
    with pytest.raises(DataError, match=r"chats\.jsonl:1: .*blue\.png: The image has 500 x 2 pixels"):
        config.build(seed=0, model=model)


def test_rows_of_images_end_with_text(tmp_path):
    vision = PixtralTowerConfig(embed=8, heads=2, patch=2)
    own = {"image_token": 2, "image_break": "<soft>", "image_end": "</image>", "longest_edge": 8, "vision": vision}
    model = Mistral3Config(vocab_size=10, embed=8, heads=2, **own)
    config = data(tmp_path, chat("red.png", "blue.png", answer="red"), row_images=3)
    (tmp_path / "red.png").write_bytes(png((255, 0, 0), (8, 8)))
    (tmp_path / "blue.png").write_bytes(png((0, 0, 255), (12, 4)))
    config.check(model)
    found = config.build(seed=0, model=model)
    batch = found.train_batch(np.array([0]))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: (struct.shape, struct.dtype) for name, struct in config.spec(model).items()
    }
    assert batch["grids"].tolist() == [[[2, 2], [1, 2], [0, 0]]]
    tokens = batch["tokens"][0].tolist()
    runs = "".join("i" if token == 2 else "." for token in tokens).strip(".")
    assert runs == "ii.ii.ii"
    red, blue = batch["pixels"][0, :16].reshape(16, 3, 4), batch["pixels"][0, 16:24].reshape(8, 3, 4)
    assert (red.transpose(0, 2, 1) == (255, 0, 0)).all() and (blue.transpose(0, 2, 1) == (0, 0, 255)).all()
    assert not batch["pixels"][0, 24:].any()
    # As many tokens, in another number of rows.
    (tmp_path / "blue.png").write_bytes(png((0, 0, 255), (4, 12)))
    with pytest.raises(DataError, match=r"blue\.png: The image has 2 tokens in 2 rows, and had 2 in 1 rows when"):
        found.train_batch(np.array([0]))


def test_images_scaled_to_a_number_of_tokens_have_tokens_around_them(tmp_path):
    vision = Gemma4TowerConfig(embed=8, heads=2, head_dim=4, patch=2, merge=2, positions=40)
    own = {"image_token": 2, "image_begin": 3, "image_end": 4, "max_image_tokens": 70, "vision": vision}
    model = Gemma4VisionConfig(vocab_size=10, embed=8, heads=2, kv_heads=1, **own)
    config = data(tmp_path, chat("red.png"), seq_tokens=80)
    config.check(model)
    batch = config.build(seed=0, model=model).train_batch(np.array([0]))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: (struct.shape, struct.dtype) for name, struct in config.spec(model).items()
    }
    assert batch["tokens"][0, :60].tolist() == [5, 3, *[2] * 55, 4, 7, 6]
    assert batch["grids"].tolist() == [[[5, 11]]]
    # Patches of red pixels, [channels, patch, patch], and padding.
    assert batch["pixels"][0, : 55 * 4].tolist() == [[255] * 4 + [0] * 8] * 220
    assert not batch["pixels"][0, 55 * 4 :].any()


def test_rows_have_at_most_row_images(tmp_path):
    found = batches(data(tmp_path, *[chat("red.png")] * 2, chat(), seq_tokens=40))
    assert found.train_rows == 2
    with pytest.raises(DataError, match=r"chats\.jsonl:1 has 2 images, and a row 1\. Raise data\.row_images"):
        batches(data(tmp_path, chat("red.png", "red.png")))


def test_the_order_depends_on_the_pixels(tmp_path):
    first = batches(data(tmp_path, chat("red.png"))).fingerprint
    found = data(tmp_path, chat("red.png"))
    (tmp_path / "red.png").write_bytes(png((254, 0, 0)))
    assert batches(found).fingerprint != first


def test_bad_images_are_named(tmp_path):
    with pytest.raises(ChatTemplateError, match=r"messages\.0\.content\.0: .*none\.png cannot be read"):
        batches(data(tmp_path, chat("none.png")))
    (tmp_path / "text.png").write_text("no image")
    found = batches(data(tmp_path, chat("text.png")))
    with pytest.raises(DataError, match=r"chats\.jsonl:1: .*text\.png: The 8 bytes are not an image that Pillow reads"):
        found.train_batch(np.array([0]))
    with pytest.raises(DataError, match="has 1 times '<image>', which stands for an image, and 0 images"):
        batches(data(tmp_path, chat(answer="<image>")))


def test_models_need_a_tower_and_its_tokens(tmp_path):
    found = data(tmp_path, chat())
    with pytest.raises(ConfigError, match="not for family 'llama'; use gemma3_vision, gemma4_vision, mistral3"):
        found.check(LlamaConfig())
    with pytest.raises(ConfigError, match=r"Set model\.image_token, model\.image_begin, model\.image_end"):
        found.check(Gemma3VisionConfig())
