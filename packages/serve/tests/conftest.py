from collections.abc import Iterator

import pytest

from .openai_server import OpenAIServer, Server, running


@pytest.fixture
def openai_server() -> Iterator[Server]:
    server = OpenAIServer()
    with running(server.app) as address:
        yield server, address
