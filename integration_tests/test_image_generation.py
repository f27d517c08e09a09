"""OpenAI's own client against the server of a tiny diffusion pipeline; the images are those of `stack sample`."""

import base64
import concurrent.futures
import contextlib
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
import pytest
import tokenizers
from browser import Browser
from flax import nnx
from PIL import Image

from stack_core.text.image_models import ImageModel, has_image_model, open_image_model
from stack_serve.http.server import HttpServer, listen
from stack_serve.images.config import ImageServerConfig
from stack_serve.images.engine import ImageEngine
from stack_serve.images.service import ImageApp, ImageService
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.diffusion import autoencoder_kl, clip, dit, unet
from stack_train.diffusion.image_model import DiffusionModel
from stack_train.diffusion.objectives import EpsilonConfig, FlowMatchingConfig
from stack_train.diffusion.pipeline import Encoders, Pipeline, save_pipeline
from stack_train.diffusion.pipeline_classes import PIPELINES
from stack_train.diffusion.prompts import PromptTokenizer, TextEncoder, TextEncoders
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.diffusion.sampling import ImageSampler, open_images

TOKENS = 4
FLOATS = {"dtype": "float32", "param_dtype": "float32"}


def write_pipeline(directory: Path) -> None:
    """Writes a Stable Diffusion pipeline of 16 x 16 pixels with random weights."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<pad>": 0, "<end>": 1, "a": 2, "red": 3, "ring": 4}, unk_token="a")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 1)])
    settings = {"eos_token": "<end>", "pad_token": "<pad>"}
    files = {"tokenizer.json": words.to_str().encode(), "tokenizer_config.json": json.dumps(settings).encode()}
    tokenizer = PromptTokenizer(HuggingFaceTokenizer(files, "words"), "text_encoder", TOKENS, 0)
    text = clip.ClipTextConfig(
        vocab_size=8, embed=16, mlp=16, layers=1, heads=2, max_positions=TOKENS, end=1, initializer_std=0.5, **FLOATS
    )
    vae = autoencoder_kl.AutoencoderKlConfig(
        image_size=16, widths=(4, 8), blocks_per_level=1, groups=4, attends=False, scaling_factor=2.0, **FLOATS
    )
    config = unet.UnetConfig(
        image_size=8, channels=4, text_tokens=TOKENS, text_dim=16, groups=4, widths=(8,), blocks_per_level=1,
        transformer_layers=(1,), heads=(2,), **FLOATS,
    )  # fmt: skip
    key = jax.random.key(0)
    (kind,) = [each for each in PIPELINES if each.name == "StableDiffusionPipeline"]
    encoder = TextEncoder(clip.COMPONENT.family.build(text, key=key), tokenizer)
    parts = TextEncoders({"text_encoder": encoder}, kind.condition)
    encoders = Encoders(directory, autoencoder_kl.FAMILY.build(vae, key=key), parts, kind)
    sampler = SamplerConfig(spacing="leading", steps_offset=1)
    model = unet.FAMILY.build(config, key=key)
    save_pipeline(directory, Pipeline(config, model, encoders, EpsilonConfig(), sampler))


@contextlib.contextmanager
def serving(model: ImageModel, **settings: Any) -> Iterator[tuple[ImageEngine, openai.OpenAI]]:
    config = ImageServerConfig(**{"port": 0, "api_keys": ("secret",), "drain_s": 1.0, "max_steps": 1000, **settings})
    engine = ImageEngine(model, max_images=config.max_images, max_waiting=config.max_waiting)
    ready, listener = threading.Event(), listen(config)
    base_url = "http://{}:{}/v1".format(*listener.getsockname()[:2])
    app = ImageApp(ImageService(model, config), lambda: engine)
    http = HttpServer(app, listener, config, announce=lambda _: ready.set())
    thread = threading.Thread(target=http.run)
    thread.start()
    assert ready.wait(240)
    with openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
        yield engine, client
    http.drain()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def sampler() -> ImageSampler:
    """A sampler of images of labels."""
    config = dit.DitConfig(image_size=8, channels=1, classes=10, patch=2, layers=1, heads=2, head_dim=8, **FLOATS)
    model = dit.FAMILY.build(config, key=jax.random.key(0))
    # A new model ignores its inputs, because its last layers are zero.
    random = np.random.default_rng(0).standard_normal
    nnx.update(model, jax.tree.map(lambda leaf: leaf + 0.1 * random(leaf.shape, np.float32), nnx.state(model)))
    return ImageSampler(model, config, FlowMatchingConfig(), 1)


@pytest.fixture(scope="module")
def served(sampler: ImageSampler) -> Iterator[tuple[ImageEngine, openai.OpenAI]]:
    with serving(DiffusionModel(sampler, "tiny")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: tuple[ImageEngine, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def pixels(encoded: str | None) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded or ""))))


def generate(client: openai.OpenAI, prompt: str, *, seed: int = 5, **options: Any) -> Any:
    own = {name: options.pop(name) for name in ("guidance", "negative_prompt") if name in options}
    options = {"model": "tiny", "extra_body": {"seed": seed, "steps": 3, **own}, **options}
    return client.images.generate(prompt=prompt, **options)


def test_images_are_those_of_the_sampler_whatever_runs_beside_them(
    client: openai.OpenAI, sampler: ImageSampler
) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = pool.submit(generate, client, "3", n=3)
        other = pool.submit(generate, client, "4", seed=8)
        answers = [first.result(), other.result(), generate(client, "3")]
    images = [[pixels(each.b64_json) for each in answer.data] for answer in answers]
    expected = sampler.images([3] * 3, SamplerConfig(steps=3), seed=5)[..., 0]
    np.testing.assert_array_equal(images[0], expected)
    np.testing.assert_array_equal(images[2], expected[:1])
    np.testing.assert_array_equal(images[1], sampler.images([4], SamplerConfig(steps=3), seed=8)[..., 0])
    assert expected.std() > 10 and (expected[0] != expected[1]).any()
    assert (images[0][0] != sampler.images([4], SamplerConfig(steps=3), seed=5)[0, ..., 0]).any()
    assert (answers[0].size, answers[0].output_format) == ("8x8", "png")


def test_events_of_a_stream_are_read_by_the_client(client: openai.OpenAI, sampler: ImageSampler) -> None:
    *partial, last = list(generate(client, "7", stream=True, partial_images=1))
    assert [event.type for event in partial] == ["image_generation.partial_image"]
    assert (last.type, last.size) == ("image_generation.completed", "8x8")
    expected = sampler.images([7], SamplerConfig(steps=3), seed=5)[0, ..., 0]
    np.testing.assert_array_equal(pixels(last.b64_json), expected)
    assert (pixels(partial[0].b64_json) != expected).any()


def test_a_closed_stream_frees_the_places_of_its_images(served: tuple[ImageEngine, openai.OpenAI]) -> None:
    engine, client = served
    before = engine.stats()
    body = {"seed": 1, "steps": 1000}
    stream = client.images.generate(prompt="1", n=4, stream=True, partial_images=3, extra_body=body)
    next(iter(stream))
    stream.close()
    generate(client, "2")
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.image_steps - before.image_steps < 3000


def test_errors_reach_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="images of 8 pixels") as error:
        generate(client, "1", size="17x15")
    assert error.value.param == "size"
    with pytest.raises(openai.BadRequestError, match="number of a label, 0 to 9"):
        generate(client, "a red ring")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_the_page_shows_images_and_errors(client: openai.OpenAI, browser: Browser) -> None:
    browser.call("Page.navigate", url=str(client.base_url).replace("/v1/", "/"))
    browser.wait_for("document.body?.dataset.ready")
    assert browser.values("#model", "each.innerText") == ["tiny"]
    for name, value in {"key": "secret", "prompt": "4", "steps": "3", "seed": "8", "n": "2"}.items():
        browser.evaluate(f"document.getElementById({name!r}).value = {value!r}")
    browser.evaluate("document.getElementById('generate').click()")
    browser.wait_for(
        "document.querySelectorAll('figcaption').length == 2 && !document.querySelector('#generate').disabled"
    )
    captions = browser.values("figcaption", "each.innerText")
    assert sorted(captions) == [f"4 (8x8, seed 8, image {index})" for index in range(2)]
    shown = browser.values("img", "each.src")
    expected = [each.b64_json for each in generate(client, "4", seed=8, n=2).data]
    assert sorted(shown) == sorted(f"data:image/png;base64,{each}" for each in expected)
    browser.evaluate("document.getElementById('prompt').value = 'a cat'")
    browser.evaluate("document.getElementById('generate').click()")
    browser.wait_for("document.getElementById('error').innerText")
    assert "number of a label, 0 to 9" in browser.values("#error", "each.innerText")[0]


@pytest.mark.slow  # compiles a UNet for two sizes
def test_a_pipeline_of_diffusers_is_served(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "pipeline")
    address = f"hf:{tmp_path / 'pipeline'}"
    assert has_image_model(address) and not has_image_model(str(tmp_path)) and not has_image_model("gguf:none.gguf")
    with serving(open_image_model(address)) as (_, client):
        answer = generate(client, "a ring", seed=8, guidance=2.0, negative_prompt="red", size="24x16", n=2)
        with pytest.raises(openai.BadRequestError, match="Take 16x14 or 18x16"):
            generate(client, "a ring", size="17x15")
    sampler = open_images(address, size=(16, 24))
    settings = sampler.sampler.changed({"steps": 3, "guidance": 2.0})
    expected = sampler.images_of(["a ring"] * 2, settings, negative=["red"] * 2, seed=8)
    np.testing.assert_array_equal([pixels(each.b64_json) for each in answer.data], expected)
    assert expected.std() > 10
