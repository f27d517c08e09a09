import email
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from stack_train.data.kinds.text import TextData
from stack_train.data.pipeline import Pipeline, build_pipeline

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "box"]
SMALL_VOCABULARY = 280


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of forty text files, of four to eleven lines each."""
    folder = tmp_path / "texts"
    for index in range(40):
        path = folder / f"part{index % 3}" / f"{index:02}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = (" ".join(WORDS[(index * line + place) % 13] for place in range(6)) for line in range(4 + index % 8))
        path.write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture
def small_stdlib(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes the package `email` all of the standard library; returns the address of `stdlib`, which is empty."""
    folder = str(Path(email.__file__).parent)
    monkeypatch.setattr("stack_train.data.stdlib.sysconfig", SimpleNamespace(get_path=lambda name: folder))
    return ""


@pytest.fixture
def pipeline(texts: Path, tmp_path: Path) -> Callable[..., Pipeline]:
    """Builds a pipeline over `texts`; keywords are fields of the config, or the seed."""

    def build(*, seed: int = 0, **fields: object) -> Pipeline:
        small = {
            "source": f"text:{texts}/**/*.txt",
            "vocab_size": SMALL_VOCABULARY,
            "seq_tokens": 32,
            "batch_size": 4,
            "validation_fraction": 0.2,
        }
        return build_pipeline(TextData(**small | fields), seed=seed, cache_dir=tmp_path / "cache")

    return build


@pytest.fixture
def advance_time() -> Callable[[Path], None]:
    """Moves a file's modification time on, as a later edit would."""

    def advance(path: Path) -> None:
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))

    return advance
