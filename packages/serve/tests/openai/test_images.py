"""Loading of the images of chat messages."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stack_core.abi.errors import GenerationError
from stack_serve.openai.images import ImageInput

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
    assert ImageInput(None, remote=True, max_bytes=10, max_tokens=9)._load(f"{site}/image.png") == DATA
    with pytest.raises(GenerationError, match=r"is no data URL.*--remote-images"):
        ImageInput(None, remote=False, max_bytes=10, max_tokens=9)._load(f"{site}/image.png")
    with pytest.raises(GenerationError, match=r"is no data URL"):
        ImageInput(None, remote=True, max_bytes=10, max_tokens=9)._load("file:///etc/hostname")


@pytest.mark.parametrize(
    ("path", "max_bytes", "problem"),
    [
        ("/image.png", 9, "has more than 9 bytes"),
        ("/missing", 10, "cannot be fetched: .*404"),
        (":x/image.png", 10, "cannot be fetched"),
    ],
)
def test_a_remote_image_that_cannot_be_read_is_refused(site: str, path: str, max_bytes: int, problem: str) -> None:
    with pytest.raises(GenerationError, match=problem):
        ImageInput(None, remote=True, max_bytes=max_bytes, max_tokens=9)._load(site + path)
