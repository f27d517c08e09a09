"""Images in prompts, observations and results of tools: their places, and what is refused."""

import asyncio
import base64
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stack_core.abi.errors import ChatTemplateError, ConfigError, DataError, EnvironmentFailed
from stack_core.abi.generation import GenerationRequest, GenerationUpdate, SamplingParams, TokenLogprob
from stack_core.text.images import ImageReader, ImageSize, ReadImage, place_images
from stack_rl.contracts import Completion, Environment
from stack_rl.environments import optional
from stack_rl.environments.count_shapes import CountShapesConfig
from stack_rl.environments.image_parts import read_parts
from stack_rl.environments.messages import MessageEnvironment, Reply, renderer_of
from stack_rl.environments.prompts import PromptsConfig
from stack_rl.environments.tasks import ListedTasks
from stack_rl.environments.tools import ToolsConfig
from stack_rl.episodes import Attempt, Player
from stack_rl.requests import EpisodeRequests
from stack_rl.sampling import AS_MODEL

from ..scripted import END, Letters, Policy, ScriptedEngine

TEMPLATE = (
    "{% if tools %}tools\n{% endif %}{% for message in messages %}<{{ message.role }}>"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}@{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\x00\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
IMAGE = ord("#")


@dataclass(frozen=True)
class Reader:
    """An `ImageReader` of files whose bytes are the tokens; an image of Pillow has a token per four columns."""

    placeholder: str = "@"
    token: int = IMAGE
    sizes: tuple[int, ...] = (4, 40)
    has_grids: bool = True
    layout: Any = "text"

    def shape(self, tokens):
        return (tokens, 1)

    def expansion(self, size):
        return f"[{'#' * size.tokens}]"

    def count_tokens(self, data):
        return self.read(data).tokens

    def measure(self, data):
        return ImageSize(self.count_tokens(data))

    def read(self, data):
        if data.startswith(b"broken"):
            raise DataError("The 6 bytes are not an image.")
        data = data[16:20] if data.startswith(b"\x89PNG") else data  # the width of a PNG file
        pixels = np.frombuffer(data, np.uint8)[:, None]
        return ReadImage(pixels, len(pixels), (1, len(pixels)))


@dataclass
class Seeing(Policy):
    """A policy with images."""

    tokenizer: Any = field(default_factory=Letters)
    chat_template: str | None = TEMPLATE
    images: ImageReader | None = field(default_factory=Reader)
    max_positions: int = 400


def url_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"}}


def picture(width: int) -> Image.Image:
    return Image.new("CMYK", (width, 2))


class Talk:
    """A conversation whose first two messages have images: the bytes of a file, a URL, and an image of Pillow."""

    async def begin(self):
        parts = [{"type": "image", "image": b"abc"}, {"type": "text", "text": "see"}, url_part(b"vwxyz")]
        return [{"role": "user", "content": parts}]

    async def reply(self, text, *, is_finished, tokens):
        if text == "more":
            return Reply(messages=[{"role": "user", "content": [{"type": "image", "image": picture(7)}]}])
        return Reply(reward=1.0)

    async def close(self): ...


def tasks_of(start, policy):
    renderer = renderer_of(policy)
    make = lambda record: MessageEnvironment(start(), renderer, max_tokens=8, max_turns=4)
    return ListedTasks([0], [], start=make, label=str, renderer=renderer)


def play(tasks, answers, *, seq_tokens=200):
    turns = iter(answers)
    engine = ScriptedEngine(lambda prompt: (*map(ord, next(turns)), END))
    (found,) = Player(tasks, engine, seq_tokens=seq_tokens, on_failure="stop").play(
        [Attempt(0, 0)], seed=(0,), greedy=False
    )
    return found, engine.requests


def test_images_of_several_turns_are_in_the_requests_and_in_the_trajectory_at_their_tokens():
    # The policy writes the image token, which is no image.
    tasks = tasks_of(Talk, Seeing())
    found, requests = play(tasks, ["more", "a#b"])
    text = "".join(map(chr, found.tokens))
    assert text.startswith("<user>[###]see[#####]\x00\n<assistant>more\x00\n<user>[####]") and text.endswith("a#b\x00")
    assert [image.pixels.tobytes() for image in found.images] == [b"abc", b"vwxyz", (7).to_bytes(4)]
    assert [found.tokens[image.start : image.end].tolist() for image in found.images] == [
        [IMAGE] * n for n in (3, 5, 4)
    ]
    assert [len(each.images) for each in requests] == [2, 3] and requests[1].images == found.images
    assert tasks.text(tuple(found.tokens.tolist())).startswith("<user>[#]see[#]\x00")
    assert tasks.text((IMAGE, IMAGE, 65, 65, IMAGE)) == "#AA#"


def test_an_image_that_a_policy_cannot_take_is_refused():
    with pytest.raises(EnvironmentFailed, match="A prompt has an image, but the policy reads text only"):
        play(tasks_of(Talk, Seeing(images=None)), ["1"])
    with pytest.raises(EnvironmentFailed, match="Images need a chat template, which writes their places"):
        play(tasks_of(Talk, Seeing(chat_template=None)), ["1"])
    with pytest.raises(EnvironmentFailed, match=r"no room .* in data.seq_tokens: 25, whose prompt of 34 has 8"):
        play(tasks_of(Talk, Seeing()), ["1"], seq_tokens=25)
    with pytest.raises(EnvironmentFailed, match="The 2 images have 8 tokens; prompt and continuation have at most 8"):
        play(tasks_of(Talk, Seeing(max_positions=8)), ["1"])


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image", "image": 3},
            r'content.0 is {"type": "image"} with a int; expected an image of P',
        ),
        ({"type": "image", "image": b"broken"}, "Image 1 of 1: The 6 bytes are not an image"),
        (
            {"type": "image_url", "image_url": {"url": "cat.png"}},
            "content.0: The image 'cat.png' is not a data URL",
        ),
        ({"type": "audio"}, "messages.0.content.0 is of type 'audio'; the model reads parts of type"),
    ],
)
def test_a_part_that_is_no_image_is_named(part, message):
    with pytest.raises(ChatTemplateError, match=message):
        read_parts([{"role": "user", "content": [part]}], Reader(), max_tokens=9)


def see(width: int) -> Any:
    """Returns a picture."""
    return picture(width)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_tool_may_return_a_picture(tmp_path, isolation):
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": "look", "answer": "5"}))
    config = ToolsConfig(
        source=str(tmp_path / "tasks.jsonl"), rewards=("exact",), tools=(see,), isolation=isolation, max_tokens=100
    )
    call = '<tool_call>{"name": "see", "arguments": {"width": 9}}</tool_call>'
    found, _ = play(config.build(Seeing(), seq_tokens=200, seed=0), [call, "5"])
    assert "<tool>[####]\x00" in "".join(map(chr, found.tokens)) and found.rewards.sum() == 1
    assert [image.pixels.tobytes() for image in found.images] == [(9).to_bytes(4)]


def rewarded(completion: Completion) -> float:
    return float(sum(image.tokens for image in completion.images))


def test_prompts_have_images_in_files_and_in_the_record(tmp_path):
    def records(*urls):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        content = [*parts, {"type": "text", "text": "see"}]
        (tmp_path / "tasks.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": content}]}))
        return PromptsConfig(source=str(tmp_path / "tasks.jsonl"), rewards=(rewarded,), max_tokens=4)

    (tmp_path / "one.png").write_bytes(b"abc")
    config = records("one.png", url_part(b"vwxyz")["image_url"]["url"])
    found, _ = play(config.build(Seeing(), seq_tokens=200, seed=0), ["1"])
    assert [(image.start, image.pixels.tobytes()) for image in found.images] == [(7, b"abc"), (12, b"vwxyz")]
    assert found.rewards.sum() == 8
    with pytest.raises(DataError, match=r"tasks.jsonl:1: A prompt has an image, but the policy reads text only"):
        config.build(Seeing(images=None), seq_tokens=200, seed=0)
    with pytest.raises(DataError, match=r"tasks.jsonl:1: the prompt has 34 tokens, but data.seq_tokens is 20"):
        config.build(Seeing(), seq_tokens=20, seed=0)
    with pytest.raises(ChatTemplateError, match=r"tasks.jsonl:1: messages.0.content.0: .*two.png cannot be read"):
        records("two.png").build(Seeing(), seq_tokens=200, seed=0)
    (tmp_path / "two.png").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"tasks.jsonl:1: The 6 bytes are not an image"):
        records("two.png").build(Seeing(), seq_tokens=200, seed=0)


def test_an_episode_that_plays_itself_continues_a_branch_with_the_same_images_only():
    sent = []
    requests = EpisodeRequests(ScriptedEngine(tuple), lambda *given: sent.append(given), AS_MODEL, False, int, 99)
    a, b = (Reader().read(each) for each in (b"ab", b"cd"))

    def ask(prompt, *images):
        tokens = tuple(map(ord, prompt))
        placed = place_images(tokens, Reader(), images)
        request = GenerationRequest(request_id=str(len(sent)), prompt=tokens, sampling=SamplingParams(), images=placed)
        requests.submit(request, lambda update: None, max_tokens=4, on_answer=lambda *given: None)
        answer = GenerationUpdate(
            request_id=request.request_id,
            tokens=(ord("x"),),
            logprobs=(TokenLogprob(ord("x"), -1.0, 1),),
            weights_versions=(0,),
            finish_reason="stop",
        )
        sent[-1][1](answer)

    async def converse():
        ask("[##]?", a)
        ask("[##]?x[##]?", a, b)  # continues
        ask("[##]?x[##]?x!", b, a)  # other images, the same tokens

    asyncio.run(converse())
    assert [len(each.images) for each in requests.branches] == [2, 2]
    assert [image.start for image in requests.branches[0].images] == [1, 7]


def test_pictures_to_count_are_those_of_their_seed_and_have_all_answers():
    settings = CountShapesConfig()
    questions = [settings.question(seed) for seed in range(200)]
    again = settings.question(7)
    assert (again.text, again.answer) == (questions[7].text, questions[7].answer)
    assert again.picture.tobytes() == questions[7].picture.tobytes() != questions[8].picture.tobytes()
    counts = Counter(each.answer for each in questions)
    assert sorted(counts) == [0, 1, 2, 3] and min(counts.values()) > 30
    assert len({each.text for each in questions}) == 12
    # Each shape has a cell of its own, and the background is dark.
    squares = CountShapesConfig(colors=("red",), shapes=("square",), max_others=0, side_pixels=64)
    for seed in range(20):
        question = squares.question(seed)
        is_red = np.asarray(question.picture)[..., 0] > 150
        assert is_red.reshape(2, 32, 2, 32).any(axis=(1, 3)).sum() == question.answer


def test_counting_is_rewarded_in_digits_and_needs_pillow_and_a_policy_with_images(monkeypatch):
    config = CountShapesConfig(held_out=2, max_tokens=3)
    assert config.has_images and isinstance(config.build(Seeing(), seq_tokens=200, seed=0).episode(0), Environment)
    tasks = config.build(Seeing(), seq_tokens=200, seed=3)
    seed = int(np.random.default_rng([3, False, 0]).integers(1 << 31))
    right = str(config.question(seed).answer)
    found, _ = play(tasks, [right])
    assert (found.verdict, found.rewards.sum()) == ("correct", 1) and len(found.images) == 1
    for wrong in ("4", right * 3):
        found, _ = play(tasks, [wrong])
        assert (found.verdict, found.rewards.sum()) == ("wrong", 0)
    with pytest.raises(DataError, match="the policy reads text only"):
        config.build(Seeing(images=None), seq_tokens=200, seed=0)
    with pytest.raises(ConfigError, match=r"environment.max_others is 1, but there is only one kind of shapes"):
        CountShapesConfig(colors=("red",), shapes=("square",))
    with pytest.raises(ConfigError, match=r"environment.side_pixels is 20; 9 shapes need at least 24"):
        CountShapesConfig(max_count=8, side_pixels=20)

    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(optional.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match=r"'count_shapes' needs the package of 'PIL.*\[images\]"):
        config.check(None)
