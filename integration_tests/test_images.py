"""Serving of a language model with images: the engine, `LLM.chat` and the OpenAI-compatible server."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from stack_core.abi.errors import ConfigError, GenerationError
from stack_core.abi.generation import SamplingParams
from stack_serve.http.server import HttpServer, listen
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.images import tower_parameters
from stack_serve.llm.language_model import LLM
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.lifecycle import OpenAIApp
from stack_serve.openai.service import Service
from stack_train.generation.generative import generative_checkpoint

from .seeing import data_url, make_config, make_model, png, question, write_tokenizer

# A model does not write image tokens.
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={4: -1e4})
# Pages of 4 tokens end in images, and a step of 12 tokens takes an image and little more.
SETTINGS = {"max_sequences": 4, "step_tokens": 12, "page_tokens": 4, "decode_repeats": 2}


def picture(seed):
    return png(np.random.default_rng(seed).integers(0, 256, (17, 30, 3), np.uint8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("seeing")
    write_tokenizer(directory)
    config = make_config(initializer_std=0.5)
    return generative_checkpoint(make_model(config), config, name="eyes", tokenizer=directory, origin=None)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **SETTINGS) as llm:
        yield llm


def conversations():
    return [
        question("which color", picture(0)),
        question("which shape is it ?", picture(1), picture(0)),
        question("which color"),
        [*question("is it red", picture(2)), {"role": "assistant", "content": "green !"}, *question("?", picture(1))],
        question("which color", picture(3)),
        question("which color", picture(0)),
    ]


def check_greedy(whole, params, output, images):
    """Checks that each token is the most likely one of the model without a cache."""
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    # Padded to one shape, as later tokens do not change earlier ones; the second image may have no tokens.
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
    pixels = np.zeros((1, 2, 24, 24, 3), np.uint8)
    for place, image in enumerate(images):
        pixels[0, place] = image.pixels
    logits = np.array(whole(params, tokens, pixels))[len(prompt) - 1 :]
    logits[:, 4] = -np.inf
    assert tuple(logits[: len(answer)].argmax(axis=-1).tolist()) == answer


@pytest.fixture(scope="module")
def whole(checkpoint):
    """Logits of a sequence with its images, without a cache."""

    def logits(params, tokens, pixels):
        model = checkpoint.model(params)
        return model.logits(model(tokens, jnp.arange(64)[None], pixels=pixels).hidden[0])

    return jax.jit(logits)


def test_answers_are_those_of_the_model_without_pages(llm, checkpoint, whole):
    outputs = llm.chat(conversations(), GREEDY)
    pictures, params = [[0], [1, 0], [], [2, 1], [3], [0]], checkpoint.load_params()
    for output, seeds in zip(outputs, pictures, strict=True):
        images = [checkpoint.images.read(picture(seed)) for seed in seeds]
        assert output.prompt_token_ids.count(checkpoint.images.token) == 4 * len(seeds)
        check_greedy(whole, params, output, images)
    # The same question about other pictures has other answers.
    assert len({outputs[place].outputs[0].token_ids for place in (0, 4)}) == 2
    assert outputs[0].outputs[0].token_ids == outputs[5].outputs[0].token_ids
    # Alone, and from the prefix cache, the answers stay the same.
    hits = llm._engine.stats().prefix_hits_tokens
    again = llm.chat(conversations()[1], GREEDY)
    assert again[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert llm._engine.stats().prefix_hits_tokens > hits


def test_features_depend_on_the_tower_alone(checkpoint):
    found = tower_parameters(checkpoint, checkpoint.images)
    assert {path.partition("/")[0] for path in found} == {"vision", "projector"}
    assert "vision/blocks/query/kernel" in found


def test_features_are_computed_once_for_equal_pixels(llm):
    rows = llm._engine._programs._images.rows
    llm.chat(question("is it blue", picture(7)), GREEDY)
    encoded = len(rows)
    llm.chat(question("color is it blue", picture(7)), GREEDY)
    assert len(rows) == encoded


@pytest.mark.slow  # starts another engine
def test_new_weights_forget_features(checkpoint, whole):
    with LLM(checkpoint, **SETTINGS) as llm:
        before = llm.chat(question("which color", picture(0)), GREEDY)[0].outputs[0].token_ids
        params = jax.tree.map(lambda leaf: leaf, checkpoint.load_params())
        params["projector"]["project"]["kernel"] = -params["projector"]["project"]["kernel"]
        llm._engine.update_weights(params)
        after = llm.chat(question("which color", picture(0)), GREEDY)[0]
        check_greedy(whole, params, after, [checkpoint.images.read(picture(0))])
        assert after.outputs[0].token_ids != before
        llm.sleep()
        llm.wake_up()
        again = llm.chat(question("which color", picture(0)), GREEDY)[0]
        assert again.outputs[0].token_ids == after.outputs[0].token_ids


AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
BAD = [
    ([AUDIO], "'input_audio'; the model reads parts of type 'text' and 'image_url'"),
    (
        [{"type": "image_url", "image_url": {"url": data_url(b"no image")}}],
        "Image 1 of 1: The 8 bytes are not an image",
    ),
    ([{"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}], "is not a data URL"),
    ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}], "is not valid base64"),
    ([{"type": "image_url", "image_url": {"url": "data:text/plain;base64,aaaa"}}], "expected data:image/TYPE"),
    ([{"type": "image_url"}], "has no image; expected"),
    ([{"type": "text", "text": "is it <img>"}], "has 1 times '<img>', which stands for an image, and 0 images"),
    ([{"type": "text", "text": "is it <pix>"}], "runs of \\[1\\]; expected runs of \\[\\]"),
    ([{"type": "image_url", "image_url": {"url": data_url(picture(0))}}] * 20, "The prompt has 1[0-9][0-9] tokens"),
]


@pytest.mark.parametrize(("parts", "message"), BAD)
def test_bad_parts_are_refused_with_their_reason(llm, parts, message):
    with pytest.raises(GenerationError, match=message):
        llm.chat([{"role": "user", "content": parts}], GREEDY)


def test_a_step_must_hold_an_image(checkpoint):
    with pytest.raises(ConfigError, match="Raise step_tokens to at least 8"):
        LLM(checkpoint, max_sequences=4, step_tokens=7)


@pytest.mark.slow  # starts another engine
def test_the_openai_client_sends_images(checkpoint, llm):
    config = OpenAIConfig(port=0, drain_s=1.0)
    listener = listen(config)
    host, port = listener.getsockname()[:2]
    ready = threading.Event()
    app = OpenAIApp(Service(checkpoint, config), lambda: LLMEngine(checkpoint, EngineConfig(**SETTINGS)))
    http = HttpServer(app, listener, config, announce=lambda _: ready.set())
    thread = threading.Thread(target=http.run)
    thread.start()
    try:
        assert ready.wait(300)
        client = openai.OpenAI(base_url=f"http://{host}:{port}/v1", api_key="none")
        options = {"model": "eyes", "temperature": 0, "max_tokens": 6, "logit_bias": {"4": -100}}
        for conversation in conversations()[:4]:
            answer = client.chat.completions.create(messages=conversation, extra_body={"ignore_eos": True}, **options)
            expected = llm.chat(conversation, GREEDY)[0]
            assert answer.choices[0].message.content == expected.text
            assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        for parts, message in BAD:
            with pytest.raises(openai.BadRequestError, match=message.replace("The prompt has 1[0-9][0-9]", "has 1..")):
                client.chat.completions.create(messages=[{"role": "user", "content": parts}], **options)
    finally:
        http.drain()
        thread.join(60)
