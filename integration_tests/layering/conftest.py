"""Every test here runs once for each package."""

from pathlib import Path

import pytest

SOURCES = sorted(Path(__file__).parents[2].glob("packages/*/src/stack_*"))


@pytest.fixture(params=SOURCES, ids=lambda source: source.name)
def source(request: pytest.FixtureRequest) -> Path:
    """The folder of one package's modules."""
    return request.param
