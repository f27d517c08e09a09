"""Adapters of a tower of images: they learn, are merged and served, and go to PEFT."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from stack_core.abi.config import to_mapping
from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.cli import main
from stack_serve.llm.language_model import LLM
from stack_train.run.resolve import parse_run
from stack_train.run.train import train

from .seeing import COLORS, make_config, png, question, write_tokenizer
from .test_images import check_greedy
from .test_post_training import losses

RULES = [{"path": "vision/blocks", "rank": 4}]


def picture(color):
    return png(np.full((24, 24, 3), COLORS[color], np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Chats about the colors of pictures, and a base run."""
    folder = tmp_path_factory.mktemp("tower")
    write_tokenizer(folder / "tokenizer")
    chats = [
        {"messages": [*question("which color", picture(color)), {"role": "assistant", "content": color}]}
        for color in COLORS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    train(parse_run(config_of(folder, "base", run={"steps": 1})))
    return folder


def config_of(folder, output, **sections):
    data = {"name": "image_chat", "source": str(folder / "chats.jsonl"), "tokenizer": str(folder / "tokenizer")}
    data |= {"seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0}
    model = to_mapping(make_config(initializer_std=0.3))
    optimizer = {"learning_rate": 0.03, "weight_decay": 0.0, "schedule": {"decay": "constant"}}
    return {"model": model, "data": data, "optimizer": optimizer, "output": str(folder / output), **sections}


@pytest.fixture(scope="module")
def adapted(folder):
    run = {"steps": 60, "init_from": str(folder / "base")}
    train(parse_run(config_of(folder, "adapted", run=run, lora={"rules": RULES})))
    return folder / "adapted"


def logits_of(address):
    """The checkpoint of an address, and its logits of a sequence with pictures, without a cache."""
    checkpoint = open_for_generation(address)

    def logits(params, tokens, pixels):
        model = checkpoint.model(params)
        positions = jnp.arange(tokens.shape[1])[None]
        return model.logits(model(tokens, positions, pixels=pixels).hidden[0])

    return checkpoint, jax.jit(logits)


@pytest.mark.slow
def test_they_learn_and_are_merged_and_served(adapted, folder, tmp_path):
    found = losses(adapted)
    assert found[-1] < found[0] / 2
    main(["convert", str(adapted), f"hf:{tmp_path / 'hf'}"])
    checkpoint, whole = logits_of(str(adapted))
    tokens, pixels = np.zeros((1, 64), np.int32), np.zeros((1, 2, 24, 24, 3), np.uint8)
    tokens[0, :6] = [3, 4, 4, 4, 4, 5]
    pixels[0, 0] = checkpoint.images.read(picture("red")).pixels
    merged, of_merged = logits_of(f"hf:{tmp_path / 'hf'}")
    own = whole(checkpoint.load_params(), tokens, pixels)
    np.testing.assert_allclose(own, of_merged(merged.load_params(), tokens, pixels), atol=1e-4)
    before, of_base = logits_of(str(folder / "base"))
    assert np.abs(own - of_base(before.load_params(), tokens, pixels)).max() > 0.1
    with LLM(checkpoint, max_sequences=2, step_tokens=32) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=1)
        outputs = llm.chat([question("which color", picture(color)) for color in COLORS], greedy)
    assert [output.text.strip() for output in outputs] == list(COLORS)
    for output, color in zip(outputs, COLORS, strict=True):
        check_greedy(whole, checkpoint.load_params(), output, [checkpoint.images.read(picture(color))])


@pytest.mark.slow
def test_they_go_to_peft(adapted, tmp_path):
    main(["convert", str(adapted), f"peft:{tmp_path / 'peft'}"])
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in tensors}
    assert len(names) == 6 and any(name.endswith("vision_model.encoder.layers.0.self_attn.q_proj") for name in names)


@pytest.mark.slow
def test_they_are_not_served_with_others(adapted, folder):
    with pytest.raises(GenerationError, match=r"vision/blocks/down/kernel, .* of base: adapters of a tower"):
        LLM(str(folder / "base"), adapters={"colors": str(adapted)}, max_sequences=2, step_tokens=32)
