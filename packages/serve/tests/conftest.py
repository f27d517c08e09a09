from collections.abc import Iterator
from pathlib import Path

import pytest

from .bundle.digits import export
from .openai_server import OpenAIServer, Server, running


@pytest.fixture
def openai_server() -> Iterator[Server]:
    server = OpenAIServer()
    with running(server.app) as address:
        yield server, address


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle, to read only."""
    directory = tmp_path_factory.mktemp("bundles") / "digits"
    export(directory)
    return directory
