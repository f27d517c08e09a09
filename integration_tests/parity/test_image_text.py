"""Image-text models against transformers on PyTorch, in float32: features, logits, losses, gradients and conversion."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image
from safetensors.numpy import load_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from stack_core.abi.plugins import registries
from stack_train.checkpoint import named_leaves
from stack_train.contrastive.objectives import SigmoidContrastiveConfig, SoftmaxContrastiveConfig
from stack_train.huggingface import FORMAT
from stack_train.variables.weights import read_params, run_config

from .conftest import model_of

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
ROWS, TOKENS, SIDE, VOCABULARY = 5, 9, 23, 61
VISION = {
    "hidden_size": 30,
    "intermediate_size": 37,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "image_size": SIDE,
    "patch_size": 7,
}
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 18,
    "intermediate_size": 29,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": TOKENS,
}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "siglip": ("Siglip", "siglip", {}, {"projection_size": 30}, {}),
    "clip": ("CLIP", "clip", {}, {"eos_token_id": 7, "pad_token_id": 7}, {"projection_dim": 11}),
    "early clip": (
        "CLIP",
        "clip",
        {"hidden_act": "gelu", "layer_norm_eps": 1e-3},
        {"eos_token_id": 2, "hidden_act": "gelu"},
        {"projection_dim": 11},
    ),
}


@dataclass(frozen=True)
class Pair:
    """One model twice; `directory` has the Hugging Face checkpoint, `run` what it was converted to."""

    torch_model: Any
    directory: Path
    run: Path
    config: Any
    model: Any


def processor_of(family: str, side: int) -> Any:
    square = {"height": side, "width": side}
    if family == "siglip":
        return SiglipImageProcessorPil(size=square, resample=Image.Resampling.BILINEAR)
    return CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size=square, image_mean=[0.4, 0.3, 0.2])


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, family, vision, text, outer = MODELS[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        text_config={**TEXT, **text}, vision_config={**VISION, **vision}, **outer
    )
    torch_model = getattr(transformers, f"{name}Model")(config).eval()
    with torch.no_grad():  # no scale or bias at its initial value, which could go missing unnoticed
        for parameter in torch_model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.25 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
        torch_model.logit_scale.fill_(1.3)
    root = tmp_path_factory.mktemp("image_text")
    torch_model.save_pretrained(root / "hf")
    processor_of(family, SIDE).save_pretrained(root / "hf")
    FORMAT.import_run(root / "hf", root / "run")
    config = run_config(root / "run").model
    assert config.name == family
    return Pair(torch_model, root / "hf", root / "run", config, model_of(config, read_params(root / "run", config)[0]))


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    tokens = random.integers(8, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
    for row, end in zip(tokens, (3, 8, 5, 6, 4), strict=True):
        row[end:] = 7  # CLIP pools at the first of them, or at the largest token
    ones = np.ones(ROWS, np.float32)
    pixels = random.integers(0, 256, (ROWS, SIDE, SIDE, 3)).astype(np.uint8)
    return {"pixels": pixels, "tokens": tokens, "weights": ones, "present": ones}


def inputs_of(pair: Pair, batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Returns the arguments of transformers' model for a batch."""
    if pair.config.name == "siglip":
        mean, std = np.full(3, 0.5), np.full(3, 0.5)
    else:
        mean, std = np.array(pair.config.vision.mean), np.array(pair.config.vision.std)
    pixels = ((batch["pixels"] / 255 - mean) / std).transpose(0, 3, 1, 2).astype(np.float32)
    return {"input_ids": torch.tensor(batch["tokens"].astype(np.int64)), "pixel_values": torch.tensor(pixels)}


def test_features_and_logits(pair, batch):
    with torch.no_grad():
        expected = pair.torch_model(**inputs_of(pair, batch))

    @jax.jit
    def outputs(model, pixels, tokens):
        images, texts = model.image_features(pixels), model.text_features(tokens)
        return images, texts, model.logits(images, texts)

    images, texts, logits = outputs(pair.model, jnp.array(batch["pixels"]), jnp.array(batch["tokens"]))
    assert np.ptp(expected.logits_per_image.numpy()) > 1
    for found, wanted in (
        (images, expected.image_embeds),
        (texts, expected.text_embeds),
        (logits, expected.logits_per_image),
    ):
        np.testing.assert_allclose(found, wanted.numpy(), atol=TOLERANCE, rtol=TOLERANCE)


def test_loss_and_gradients(pair, batch):
    """Of the loss of each family, with respect to every parameter."""
    pair.torch_model.zero_grad()
    theirs = pair.torch_model(**inputs_of(pair, batch), return_loss=True).loss
    theirs.backward()
    objective = SigmoidContrastiveConfig() if pair.config.name == "siglip" else SoftmaxContrastiveConfig()

    def loss(model):
        return objective(model, jax.tree.map(jnp.array, batch), key=jax.random.key(0))[0]

    ours, gradients = nnx.jit(nnx.value_and_grad(loss))(pair.model)
    np.testing.assert_allclose(ours, theirs.item(), rtol=1e-5)
    leaves = named_leaves(nnx.to_pure_dict(gradients))
    expected = {name: each.grad.numpy() for name, each in pair.torch_model.named_parameters()}
    assert len(expected) > 40
    for rule in registries.models[pair.config.name].weight_rules(pair.config):
        for name, found in rule.tensors(leaves[rule.parameter]).items():
            wanted = rule.part_of(expected.pop(name) if rule.part[1] == 1 else expected[name])
            np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=TOLERANCE, err_msg=name)
    assert all("in_proj" in name for name in expected), "every tensor is compared"


def test_a_checkpoint_comes_back_bit_by_bit_and_is_opened_by_transformers(pair, batch, tmp_path):
    FORMAT.export_run(pair.run, tmp_path / "back")
    before, after = (load_file(each / "model.safetensors") for each in (pair.directory, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(tensor.tobytes() == after[name].tobytes() for name, tensor in before.items())
    # Without the original file, the written config must describe the same model.
    mapping = registries.models[pair.config.name].config_map.write(pair.config)
    rewritten = type(pair.torch_model.config).from_dict(mapping)
    again = type(pair.torch_model).from_pretrained(tmp_path / "back", config=rewritten)
    with torch.no_grad():
        found, expected = (model(**inputs_of(pair, batch)).logits_per_image for model in (again, pair.torch_model))
    assert torch.equal(found, expected)


def test_images_have_the_pixels_of_transformers_with_the_exported_preprocessing(pair, tmp_path):
    FORMAT.export_run(pair.run, tmp_path / "back")
    kind = type(processor_of(pair.config.name, SIDE))
    theirs = kind.from_pretrained(tmp_path / "back")
    original = kind.from_pretrained(pair.directory)
    random = np.random.default_rng(0)
    for height, width in ((SIDE, SIDE), (41, 67), (90, 31)):
        image = Image.fromarray(random.integers(0, 256, (height, width, 3)).astype(np.uint8))
        image = image.resize((2 * width, 2 * height), Image.Resampling.BICUBIC)
        pixels = np.asarray(pair.config.scaling(image, (SIDE, SIDE)))
        expected = theirs(image, return_tensors="np")["pixel_values"][0]
        found = inputs_of(pair, {"pixels": pixels[None], "tokens": np.zeros((1, TOKENS))})["pixel_values"][0]
        np.testing.assert_allclose(found, expected, atol=1e-6)
        np.testing.assert_array_equal(original(image, return_tensors="np")["pixel_values"][0], expected)
