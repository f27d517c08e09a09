from collections.abc import Iterator

import pytest

from .openai_server import OpenAIServer, running


@pytest.fixture
def openai_server() -> Iterator[tuple[OpenAIServer, str]]:
    server = OpenAIServer()
    with running(server.app) as address:
        yield server, address
