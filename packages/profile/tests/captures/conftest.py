"""The optional library that tracks the Python heap."""

import sys

import pytest

from stack_profile.captures.python_heap import crashes


@pytest.fixture(scope="module")
def memray():
    module = pytest.importorskip("memray", reason="needs stack-profile[memray]")
    if crashes(sys.version_info[:2], module.__version__):
        pytest.skip(f"memray {module.__version__} crashes this Python")
    return module
