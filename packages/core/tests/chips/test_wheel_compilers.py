"""The compilers of NVIDIA's wheels go before a machine's own while something is compiled for a GPU."""

import os
from pathlib import Path

import pytest

from stack_core.chips.wheel_compilers import path_with_wheel_compilers, use_wheel_compilers


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The folder of a wheel's compilers, in a package `nvidia` that has no other parts."""
    folder = tmp_path / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(folder)


def test_a_wheels_compilers_go_first_and_the_path_is_put_back(wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/own")
    with use_wheel_compilers():
        assert os.environ["PATH"].split(os.pathsep)[0] == wheel
        assert os.environ["PATH"].split(os.pathsep)[-1] == "/own"
    assert os.environ["PATH"] == "/own"


def test_an_unset_path_stays_unset(wheel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PATH")
    with use_wheel_compilers():
        assert os.environ["PATH"].startswith(wheel)
    assert "PATH" not in os.environ


def test_without_wheels_the_path_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/own")
    assert path_with_wheel_compilers() == "/own"
