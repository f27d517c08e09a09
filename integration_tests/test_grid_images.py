"""Serving of a language model whose images have positions in two directions and different numbers of tokens."""

import asyncio
import io
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from PIL import Image

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import SamplingParams
from stack_core.text.images import ReadImage, place_images
from stack_quant.model import quantize_model
from stack_serve.http.server import HttpServer, listen
from stack_serve.llm import engine as engine_module
from stack_serve.llm.config import EngineConfig, SpeculationConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.llm.language_model import LLM
from stack_serve.llm.speculation import Speculation
from stack_serve.openai import service as service_module
from stack_serve.openai.bodies import parse
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.lifecycle import OpenAIApp
from stack_serve.openai.schemas import ChatBody, TokenizeChatBody
from stack_serve.openai.service import Service
from stack_train.generation.generative import generative_checkpoint

from .seeing import (
    GRID_TEMPLATE,
    data_url,
    make_grid_config,
    make_model,
    make_windowed_config,
    png,
    question,
    write_tokenizer,
)

# A model does not write image tokens.
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logit_bias={4: -1e4})
# Images of up to 16 tokens are divided between steps of 12 tokens and pages of 4.
SETTINGS = {"max_sequences": 4, "step_tokens": 12, "page_tokens": 4, "decode_repeats": 2}
SIZES = [(24, 24), (12, 30), (6, 6), (20, 7)]
TOKENS = [16, 10, 1, 3]


def picture(number):
    """A picture of its own size."""
    return png(np.random.default_rng(number).integers(0, 256, (*SIZES[number], 3), np.uint8))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("grids")
    write_tokenizer(directory, GRID_TEMPLATE)
    config = make_grid_config(initializer_std=0.5)
    return generative_checkpoint(make_model(config), config, name="eyes", tokenizer=directory, origin=None)


@pytest.fixture(scope="module")
def llm(checkpoint):
    with LLM(checkpoint, **SETTINGS) as llm:
        yield llm


CONVERSATIONS = [
    (question("which color", picture(0)), [0]),
    (question("which shape is it ?", picture(1), picture(3)), [1, 3]),
    (question("which color"), []),
    (
        [*question("is it red", picture(2)), {"role": "assistant", "content": "green !"}, *question("?", picture(0))],
        [2, 0],
    ),
    (question("which color", picture(1)), [1]),
    (question("which color", picture(0)), [0]),
]


@pytest.fixture(scope="module")
def whole(checkpoint):
    return logits_of(checkpoint)


def logits_of(checkpoint):
    """Returns a function to the logits of a sequence with up to two images, without a cache."""

    def logits(params, tokens, pixels, grids):
        model = checkpoint.model(params)
        return model.logits(model(tokens, jnp.arange(64)[None], pixels=pixels, grids=grids).hidden[0])

    return jax.jit(logits)


TOLERANCE = {"float": 0.0, "w8a8": 0.1}  # codes of activations: sums in another order take one to its neighbour


def check_greedy(whole, checkpoint, output, numbers, tolerance=0.0):
    """Checks that each token is the most likely one of the model without a cache, except for a difference of logits."""
    prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(prompt) + len(answer)] = [*prompt, *answer]
    images = [checkpoint.images.read(picture(number)) for number in numbers]
    pixels, grids = np.zeros((1, 4 * 32, 27), np.uint8), np.zeros((1, 2, 2), np.int32)
    if images:
        packed = np.concatenate([image.pixels for image in images])
        pixels[0, : len(packed)], grids[0, : len(images)] = packed, [image.grid for image in images]
    logits = np.array(whole(checkpoint.load_params(), tokens, pixels, grids))[len(prompt) - 1 :]
    logits[:, 4] = -np.inf
    chosen = logits[np.arange(len(answer)), answer]
    assert (logits[: len(answer)].max(axis=-1) - chosen <= tolerance).all()


def test_answers_are_those_of_the_model_without_pages(llm, checkpoint, whole):
    outputs = llm.chat([messages for messages, _ in CONVERSATIONS], GREEDY)
    for output, (_, numbers) in zip(outputs, CONVERSATIONS, strict=True):
        assert output.prompt_token_ids.count(4) == sum(TOKENS[number] for number in numbers)
        check_greedy(whole, checkpoint, output, numbers)
    # The same question about another picture has another answer.
    assert outputs[0].outputs[0].token_ids != outputs[4].outputs[0].token_ids
    # Alone, and with all pages but the last one from the prefix cache, the answer stays the same.
    again = llm.chat(CONVERSATIONS[0][0], GREEDY)
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    # Of another question about the picture, the first pages are cached; the last of them ends in the image.
    hits, rows = llm._engine.stats().prefix_hits_tokens, llm._engine._programs._images.rows
    encoded = len(rows)
    (other,) = llm.chat(question("is it red", picture(0)), GREEDY)
    assert [place for place, token in enumerate(other.prompt_token_ids) if token == 4] == list(range(2, 18))
    assert llm._engine.stats().prefix_hits_tokens - hits == 16
    check_greedy(whole, checkpoint, other, [0])
    assert len(rows) == encoded == len(SIZES)


@pytest.mark.slow  # starts another engine
@pytest.mark.parametrize("rules", ["float", "w8a8"])
def test_answers_of_a_tower_with_windows_are_those_of_the_model_without_pages(rules, tmp_path):
    write_tokenizer(tmp_path, GRID_TEMPLATE)
    config = make_windowed_config(initializer_std=0.5)
    model = make_model(config)
    if rules == "w8a8":
        sample = {name: jnp.zeros((1, 64), jnp.int32) for name in ("tokens", "positions")}
        model = quantize_model(model, [{"path": ".*", "weights": "int8", "activations": "int8"}], sample)
    checkpoint = generative_checkpoint(model, config, name="eyes", tokenizer=tmp_path, origin=None)
    whole = logits_of(checkpoint)
    with LLM(checkpoint, **SETTINGS) as llm:
        outputs = llm.chat([messages for messages, _ in CONVERSATIONS], GREEDY)
        for output, (_, numbers) in zip(outputs, CONVERSATIONS, strict=True):
            check_greedy(whole, checkpoint, output, numbers, tolerance=TOLERANCE[rules])
        assert outputs[0].outputs[0].token_ids != outputs[4].outputs[0].token_ids


# A random model repeats itself if it has few tokens.
REPEATS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={8: 60.0, 9: 60.0, 17: 60.0})


@pytest.fixture
def drafts_always(monkeypatch):
    monkeypatch.setattr(Speculation, "_cost", lambda *_: 1e-9)
    monkeypatch.setattr("stack_serve.llm.speculation._Duration.is_known", True)
    monkeypatch.setattr(Speculation, "_drafting_cost", lambda *_: 1e-9)


@pytest.mark.slow  # starts another engine
def test_answers_are_the_same_with_drafts_and_preemption(llm, checkpoint, drafts_always):
    conversations = [messages for messages, _ in CONVERSATIONS]
    speculation = SpeculationConfig(tokens=5, min_match=1, max_match=3)
    # Pages for one sequence of the maximum length.
    with LLM(checkpoint, **SETTINGS, pages=24, speculation=speculation) as drafting:
        found = drafting.chat(conversations, REPEATS)
        stats = drafting._engine.stats()
    assert stats.preemptions and stats.accepted_tokens > 20
    expected = llm.chat(conversations, REPEATS)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]
    assert not llm._engine.stats().preemptions


@pytest.mark.slow  # starts another engine
def test_a_draft_model_drafts_sequences_without_images(llm, checkpoint, drafts_always, monkeypatch):
    monkeypatch.setattr(engine_module, "open_for_generation", lambda _: checkpoint)
    conversations = [messages for messages, _ in CONVERSATIONS]
    with LLM(checkpoint, **SETTINGS, speculation="draft", draft_model="the same") as drafting:
        draft = drafting._engine._proposer.programs
        assert draft.image_rows == 0 < drafting._engine._programs.image_rows
        deadline_s = time.monotonic() + 300
        while draft.to_compile:  # until then, it drafts nothing
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        with_images = drafting.chat(conversations[:2], REPEATS)
        assert drafting._engine.stats().drafts == 0
        found = [*with_images, *drafting.chat(conversations[2:], REPEATS)]
        assert drafting._engine.stats().accepted_tokens > 20
    expected = llm.chat(conversations, REPEATS)
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


def test_pictures_of_equal_patches_differ_by_their_proportions(llm, checkpoint):
    wide = np.full((12, 24, 3), 200, np.uint8)
    pictures = png(wide), png(wide.transpose(1, 0, 2))
    read = [checkpoint.images.read(each) for each in pictures]
    assert [each.grid for each in read] == [(2, 4), (4, 2)] and (read[0].pixels == read[1].pixels).all()
    one_token = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3)
    outputs = [llm.chat(question("which color", each), one_token)[0] for each in pictures]
    first, second = (dict(output.outputs[0].logprobs[0].top) for output in outputs)
    assert not np.allclose([first[token] for token in first], [second.get(token, 0.0) for token in first], atol=1e-4)


VIDEO = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}
BAD = [
    ([VIDEO], "'video_url'; the model reads parts of type 'text' and 'image_url'"),
    (
        [{"type": "image_url", "image_url": {"url": data_url(b"no image")}}],
        "Image 1 of 1: The 8 bytes are not an image",
    ),
    ([{"type": "image_url", "image_url": {"url": data_url(png(np.zeros((1, 201, 3), np.uint8)))}}], "up to 200 times"),
    ([{"type": "text", "text": "is it <pix>"}], "has 1 times '<pix>', which stands for an image, and 0 images"),
]


@pytest.mark.parametrize(("parts", "message"), BAD)
def test_bad_parts_are_refused_with_their_reason(llm, parts, message):
    with pytest.raises(GenerationError, match=message):
        llm.chat([{"role": "user", "content": parts}], GREEDY)


def test_many_huge_images_are_refused_before_they_are_decoded(checkpoint, llm):
    file = io.BytesIO()
    Image.new("1", (4096, 4096)).save(file, format="PNG")
    assert len(file.getvalue()) < 4096
    messages = question("which color", *[file.getvalue()] * 1000)  # 50 GB of pixels
    refusal = "The 1000 images have 16000 tokens; prompt and continuation have at most 96"
    with pytest.raises(GenerationError, match=refusal):
        llm.chat(messages, GREEDY)
    service = Service(checkpoint, OpenAIConfig())
    for body in (parse(TokenizeChatBody, {"messages": messages}), parse(ChatBody, {"messages": messages})):
        with pytest.raises(GenerationError, match=refusal):
            asyncio.run(service.chat_prompt(body, None))


def test_images_are_hashed_beside_the_event_loop(checkpoint, monkeypatch):
    threads = []

    def place(*args):
        threads.append(threading.current_thread())
        return place_images(*args)

    large = ReadImage(np.zeros((1024, 27), np.uint8), 1, (1, 1))
    monkeypatch.setattr(service_module, "place_images", place)
    monkeypatch.setattr(type(checkpoint.images), "read", lambda *_: large)
    body = parse(TokenizeChatBody, {"messages": question("which color", picture(2))})
    prompt = asyncio.run(Service(checkpoint, OpenAIConfig()).chat_prompt(body, None))
    assert prompt.images[0].pixels is large.pixels
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


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
        for conversation, _ in CONVERSATIONS[:4]:
            answer = client.chat.completions.create(messages=conversation, extra_body={"ignore_eos": True}, **options)
            expected = llm.chat(conversation, GREEDY)[0]
            assert answer.choices[0].message.content == expected.text
            assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        for parts, message in BAD:
            with pytest.raises(openai.BadRequestError, match=message):
                client.chat.completions.create(messages=[{"role": "user", "content": parts}], **options)
    finally:
        http.drain()
        thread.join(60)
