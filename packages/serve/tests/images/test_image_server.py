"""The server of images with a fake model: batching, limits, errors, streams, disconnects and shutdown."""

import base64
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx2
import numpy as np
import pytest
from PIL import Image

from stack_core.abi.errors import GenerationError
from stack_core.text.image_models import ImageModel, ImageRequest, ImageState
from stack_serve.http.server import HttpServer, listen
from stack_serve.images.config import ImageServerConfig
from stack_serve.images.engine import ImageEngine
from stack_serve.images.service import ImageApp, ImageService


class Painter(ImageModel):
    """Images of one colour: seed, number of the image, and step.

    Attributes:
      batches: seeds of the images of each batch.
      held: cleared, steps wait.
    """

    name = "painter"

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.held = threading.Event()
        self.held.set()

    def resolve(self, request: ImageRequest) -> ImageRequest:
        size = request.size or (8, 8)
        if size[0] % 8 or size[1] % 8:
            raise GenerationError(f"The size is {size[1]}x{size[0]}; take 8x8.", parameter="size")
        return replace(request, size=size, steps=request.steps or 3)

    def begin(self, request: ImageRequest, images: int) -> list[ImageState]:
        if request.prompt == "broken":
            raise ValueError("broken")
        assert request.size is not None and request.steps is not None
        return [ImageState(request.size, 0, request.steps, (request, number)) for number in range(images)]

    def advance(self, states: Sequence[ImageState]) -> list[ImageState]:
        assert self.held.wait(60)
        time.sleep(0.002)
        self.batches.append([state.value[0].seed for state in states])
        if any(state.value[0].prompt == "too large" for state in states):
            raise MemoryError
        return [replace(state, step=state.step + 1) for state in states]

    def pixels(self, state: ImageState) -> np.ndarray:
        (request, number), (height, width) = state.value, state.value[0].size
        return np.broadcast_to(np.array([request.seed % 256, number, state.step], np.uint8), (height, width, 3)).copy()


class Served:
    def __init__(self, **options: Any) -> None:
        config = ImageServerConfig(**{"port": 0, "drain_s": 1.0, **options})
        self.model = Painter()
        self.service = ImageService(self.model, config)
        settings = {"max_images": config.max_images, "max_waiting": config.max_waiting}
        self.engine = ImageEngine(self.model, **settings)
        ready, listener = threading.Event(), listen(config)
        self.address = "http://{}:{}".format(*listener.getsockname()[:2])
        app = ImageApp(self.service, lambda: self.engine)
        self.http = HttpServer(app, listener, config, announce=lambda _: ready.set())
        self.thread = threading.Thread(target=self.http.run)
        self.thread.start()
        assert ready.wait(60)
        self.client = httpx2.Client(base_url=self.address, timeout=60)

    def post(self, **body: Any) -> Any:
        return self.client.post("/v1/images/generations", json={"prompt": "a", "seed": 7, **body})

    def wait(self, condition: Any) -> None:
        deadline_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline_s, "waited too long"
            time.sleep(0.005)

    def counts(self) -> tuple[int, int]:
        stats = self.engine.stats()
        return stats.running, stats.waiting

    def close(self) -> None:
        self.client.close()
        self.http.drain()
        self.model.held.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Served]:
    served = Served(**options)
    try:
        yield served
    finally:
        served.close()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running() as served:
        yield served


def opened(text: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(text)))


@pytest.mark.parametrize("output_format", ["png", "jpeg", "webp"])
def test_an_answer_has_each_image_in_its_format(served: Served, output_format: str) -> None:
    answer = served.post(n=2, size="16x8", steps=5, output_format=output_format).json()
    images = [opened(each["b64_json"]) for each in answer["data"]]
    assert [(image.format, image.size) for image in images] == [(output_format.upper(), (16, 8))] * 2
    members = {key: answer[key] for key in ("seed", "size", "output_format", "background")}
    assert members == {"seed": 7, "size": "16x8", "output_format": output_format, "background": "opaque"}
    for number, image in enumerate(images):
        colour = np.array(image.convert("RGB"))[0, 0].astype(int)
        assert np.abs(colour - [7, number, 5]).max() <= (0 if output_format == "png" else 12)


def test_images_without_a_seed_differ_and_return_theirs(served: Served) -> None:
    seeds = {served.post(seed=None).json()["seed"] for _ in range(3)}
    assert len(seeds) == 3


def test_a_stream_has_partial_images_and_completed_ones(served: Served) -> None:
    with served.client.stream(
        "POST", "/v1/images/generations",
        json={"prompt": "a", "seed": 7, "n": 2, "steps": 9, "stream": True, "partial_images": 2},
    ) as answer:  # fmt: skip
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [event.split("\n") for event in answer.read().decode().split("\n\n") if event]
    read = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in events]
    assert all(name == event["type"] for name, event in read)
    for index in range(2):
        mine = [event for _, event in read if event["index"] == index]
        assert [(event["step"], event.get("partial_image_index")) for event in mine] == [(3, 0), (6, 1), (9, None)]
        assert [event["type"].rpartition(".")[2] for event in mine] == ["partial_image"] * 2 + ["completed"]
        assert [np.array(opened(event["b64_json"]))[0, 0, 2] for event in mine] == [3, 6, 9]


def test_requests_share_batches_by_size_and_join_between_steps() -> None:
    with running(max_images=3) as served:
        served.model.held.clear()
        answers: list[Any] = []
        bodies = [{"seed": 1, "steps": 6}, {"seed": 2}, {"seed": 3, "size": "16x16"}, {"seed": 4}]
        threads = [threading.Thread(target=lambda each=each: answers.append(served.post(**each))) for each in bodies]
        for number, thread in enumerate(threads):
            thread.start()
            served.wait(lambda number=number: sum(served.counts()) == number + 1)
        assert served.counts() == (1, 3)  # the others join before the second step
        served.model.held.set()
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200] * 4
        batches = served.model.batches
        assert [1, 2] in batches and [3] in batches and not any(3 in batch and len(batch) > 1 for batch in batches)
        # The fourth started before the first, of more steps, had finished.
        assert any({1, 4} <= set(batch) for batch in batches)
        for answer in answers:
            body = answer.json()
            pixel = np.array(opened(body["data"][0]["b64_json"]))[0, 0]
            assert tuple(pixel) == (body["seed"], 0, 6 if body["seed"] == 1 else 3)


def test_a_client_that_leaves_frees_its_place() -> None:
    with running(max_images=1) as served:
        served.model.held.clear()
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(f"{served.address}/v1/images/generations", json={"prompt": "a", "n": 3}, timeout=0.3)
        served.wait(lambda: served.counts() == (0, 0))
        served.model.held.set()
        assert served.post(seed=9, steps=2).status_code == 200
        assert served.model.batches[-2:] == [[9], [9]] and len(served.model.batches) <= 3


BAD = [
    ({"prompt": None}, 400, "prompt", "missing"),
    ({"size": "9x8"}, 400, "size", "9x8; take 8x8"),
    ({"size": "large"}, 400, "size", "size"),
    ({"size": "9999x9999"}, 400, "size", "99980001 pixels; this server allows 4194304"),
    ({"n": 11}, 400, "n", "11 images; this server allows 10"),
    ({"n": 0}, 400, "n", "greater than or equal to 1"),
    ({"steps": 201}, 400, "steps", "allows 200"),
    ({"response_format": "url"}, 400, "response_format", "b64_json"),
    ({"partial_images": 1}, 400, "partial_images", "needs stream: true"),
    ({"output_compression": 50}, 400, "output_compression", "lossless"),
    ({"num_steps": 3}, 400, "num_steps", "Did you mean 'steps'|Unrecognized"),
    ({"style": "vivid"}, 400, "style", "Describe it in the prompt"),
    ({"quality": "hd"}, 400, "quality", "Use steps and size"),
    ({"model": "dall-e-3"}, 404, "model", "'painter'"),
    ({"prompt": "broken"}, 500, None, "The image failed"),
    ({"prompt": "too large"}, 500, None, "The image failed"),
]


@pytest.mark.parametrize(("body", "status", "param", "message"), BAD)
def test_bad_requests_get_errors_in_openais_form(
    served: Served, body: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    answer = served.post(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert any(each in error["message"] for each in message.split("|")), error
    assert served.post().status_code == 200


def test_full_queues_keys_and_time_limits() -> None:
    with running(max_images=1, max_waiting=2, api_keys=("secret",), timeout_s=0.5) as served:
        assert served.post().status_code == 401
        served.client.headers["Authorization"] = "Bearer secret"
        served.model.held.clear()
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(served.post(n=2)))
        thread.start()
        served.wait(lambda: served.engine.stats().waiting == 1)
        refused = served.post(n=2)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        thread.join(60)
        assert answers[0].status_code == 504


def test_standard_routes(served: Served) -> None:
    served.post()
    assert served.client.get("/v1/models").json()["data"][0]["id"] == "painter"
    assert served.client.get("/v1/models/painter").json()["object"] == "model"
    assert served.client.get("/health").status_code == served.client.get("/ready").status_code == 200
    metrics = served.client.get("/metrics").text
    finished = next(line for line in metrics.splitlines() if line.startswith("stack:images_finished_total"))
    assert float(finished.split()[-1]) >= 1
    assert 'handler="/v1/images/generations",method="POST",status="200"' in metrics
    paths = served.client.get("/openapi.json").json()["paths"]
    assert "/v1/images/generations" in paths and "/v1/chat/completions" not in paths
    assert served.client.post("/v1/chat/completions", json={}).json()["error"]["code"] == "not_found"


def test_running_requests_are_cut_short_after_the_drain_time() -> None:
    with running(drain_s=0.2) as served:
        served.model.held.clear()
        answers: list[Any] = []
        thread = threading.Thread(target=lambda: answers.append(served.post()))
        thread.start()
        served.wait(lambda: served.engine.stats().running == 1)
        served.http.drain()
        thread.join(60)
        assert answers[0].status_code == 503
