"""Loading of the images of chat messages."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from stack_core.abi.errors import ChatTemplateError, ConfigError, GenerationError
from stack_core.text.images import ImageSize, ReadImage
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.images import ImageInput, ImageLoader
from stack_serve.openai.service import Service

from .fake_engine import checkpoint

DATA = b"0123456789"


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        self.wfile.write(DATA)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_remote_image_is_fetched_only_if_allowed(site: str) -> None:
    assert ImageLoader(remote=True, max_bytes=10).load(f"{site}/image.png") == DATA
    with pytest.raises(GenerationError, match=r"is not a data URL.*--remote-images"):
        ImageLoader(remote=False, max_bytes=10).load(f"{site}/image.png")
    with pytest.raises(GenerationError, match=r"is not a data URL"):
        ImageLoader(remote=True, max_bytes=10).load("file:///etc/hostname")


@pytest.mark.parametrize(
    ("path", "max_bytes", "problem"),
    [
        ("/image.png", 9, "have more than 9 bytes"),
        ("/missing", 10, "cannot be fetched: .*404"),
        (":x/image.png", 10, "cannot be fetched"),
    ],
)
def test_a_remote_image_that_cannot_be_read_is_refused(site: str, path: str, max_bytes: int, problem: str) -> None:
    with pytest.raises(GenerationError, match=problem):
        ImageLoader(remote=True, max_bytes=max_bytes).load(site + path)


class Reader:
    """An `ImageReader` of images of one token."""

    placeholder, token, sizes, has_grids, layout = "<img>", 0, (1,), False, "whole"

    def shape(self, tokens: int) -> tuple[int, ...]:
        return (tokens,)

    def expansion(self, size: ImageSize) -> str:
        return "<img>" * size.tokens

    def count_tokens(self, data: bytes) -> int:
        return 1

    def measure(self, data: bytes) -> ImageSize:
        return ImageSize(1)

    def read(self, data: bytes) -> ReadImage:
        return ReadImage(np.zeros(len(data), np.uint8), 1)


def test_the_fetched_images_of_a_request_are_bounded_together(site: str) -> None:
    part = {"type": "image_url", "image_url": {"url": f"{site}/image.png"}}
    images = ImageInput(Reader(), remote=True, max_bytes=20, max_tokens=9)
    for count in (2, 1, 2):  # each request has the whole bound
        found = images.render(lambda messages: "<img>" * count, [{"role": "user", "content": [part] * count}])  # noqa: B023
        assert [len(image.pixels) for image in found[1]] == [len(DATA)] * count
    with pytest.raises(ChatTemplateError, match=r"messages\.0\.content\.2: .* have more than 20 bytes"):
        images.render(lambda messages: "<img>" * 3, [{"role": "user", "content": [part] * 3}])


def test_fetching_for_a_model_without_images_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^remote_images: 'tiny' does not read images"):
        Service(checkpoint(), OpenAIConfig(remote_images=True))
