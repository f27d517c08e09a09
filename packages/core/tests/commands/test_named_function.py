"""FILE.py:fn is found with its arguments, or what is missing is said."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stack_core.abi.errors import ArgumentError, UnknownName
from stack_core.commands.named_function import named_function

MODEL = """
from beside import SCALE

def layer(x, weight, scale=SCALE):
    return x * weight * scale

def whole(*parts):
    return parts
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    imported = set(sys.modules)
    (tmp_path / "beside.py").write_text("SCALE = 2\n")
    (tmp_path / "bare.py").write_text(MODEL)
    (tmp_path / "model.py").write_text(f"{MODEL}\ndef example_args():\n    return 3, 4\n")
    (tmp_path / "one.py").write_text(f"{MODEL}\ndef example_args():\n    return [3]\n")
    yield tmp_path
    for name in sys.modules.keys() - imported:
        del sys.modules[name]


def test_a_function_comes_with_the_arguments_of_its_file(folder: Path) -> None:
    fn, arguments = named_function(f"{folder / 'model.py'}:layer")
    assert fn(*arguments) == 24
    assert named_function(f"{folder / 'one.py'}:layer")[1] == ([3],)
    assert named_function(f"{folder / 'bare.py'}:whole")[1] == ()


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("model.py:layers", r"has no function 'layers'. Did you mean 'layer'"),
        ("model.py:SCALE", r"has no function 'SCALE'"),
        ("model.py", "does not name a function of a file; write FILE.py:fn"),
        ("absent.py:layer", "does not name a function of a file"),
        ("bare.py:layer", r"takes x, weight, but its file has no example_args\(\)"),
    ],
)
def test_what_names_no_function_is_an_error(folder: Path, target: str, expected: str) -> None:
    with pytest.raises(UnknownName, match=expected):
        named_function(str(folder / target))


@pytest.mark.parametrize(
    ("source", "expected"), [("def step(:\n", "SyntaxError: .*line 1"), ("\n1 / 0\n", "ZeroDivisionError at .*:2: ")]
)
def test_an_error_of_the_file_is_one_line(folder: Path, source: str, expected: str) -> None:
    (folder / "wrong.py").write_text(source)
    with pytest.raises(ArgumentError, match=f"wrong.py' cannot be run: {expected}"):
        named_function(f"{folder / 'wrong.py'}:step")
