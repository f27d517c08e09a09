"""The cache directory follows the XDG specification."""

from pathlib import Path

from stack_core.abi.user_cache import user_cache_dir


def test_default_place(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "stack"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache_dir() == Path.home() / ".cache" / "stack"
