import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stack_core.abi.data import Document
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.bpe import trained_bpe
from stack_train.data.text import TextSource


@dataclass
class Counted:
    """A source that counts how often it is read, and may change while it is."""

    texts: list[str]
    readings: int = 0
    changes: bool = False

    def documents(self) -> Iterator[Document]:
        self.readings += 1
        for number, text in enumerate(self.texts):
            yield Document(str(number), text)

    def fingerprint(self) -> str:
        return f"{self.texts}{self.readings if self.changes else 0}"


@dataclass(frozen=True)
class Settings:
    vocab_size: int = 280
    sample_bytes: int = 1_000_000
    validation_fraction: float = 0.0


def _train(source, cache_dir: Path, **changes: object):
    return trained_bpe(source, cache_dir=cache_dir, **dataclasses.asdict(Settings(**changes)))


def test_training_twice_gives_the_same_bytes(texts: Path, tmp_path: Path) -> None:
    for number in range(2):
        _train(TextSource(f"{texts}/**/*.txt"), tmp_path / str(number)).save(tmp_path / f"saved{number}")
    first, second = ((tmp_path / f"saved{number}" / "tokenizer.json").read_bytes() for number in range(2))
    assert first == second


def test_learns_what_repeats_and_marks_texts(tmp_path: Path) -> None:
    tokenizer = _train(Counted(["abracadabra " * 9]), tmp_path, vocab_size=262)
    ids = tokenizer.encode("abracadabra")
    assert ids[0] == tokenizer.bos_id
    assert len(ids) < 1 + len("abracadabra")
    assert tokenizer.decode(ids) == "abracadabra"
    assert tokenizer.vocab_size == 262
    assert sorted([tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id]) == [0, 1, 2]


def test_the_cache_answers_for_the_same_documents_and_settings_only(tmp_path: Path) -> None:
    source = Counted(["toto bebe oror notnot thatthat isis thethe questionquestion " * 9])
    _train(source, tmp_path)
    before = source.readings
    _train(source, tmp_path)
    assert source.readings == before
    digests = {
        _train(source, tmp_path, **changes).digest for changes in ({}, {"vocab_size": 270}, {"sample_bytes": 99})
    }
    assert len(digests) == 3


def test_held_out_documents_are_not_trained_on(tmp_path: Path) -> None:
    texts = [f"{letter * 2} " * 20 for letter in "abcdefghij"]
    tokenizer = _train(Counted(texts), tmp_path, vocab_size=268, validation_fraction=0.5)
    learned = [letter for letter in "abcdefghij" if len(tokenizer.encode_batch([letter * 2])[0]) == 2]
    assert len(learned) == 5


def test_the_sample_is_cut_in_the_middle_of_a_character(tmp_path: Path) -> None:
    assert _train(Counted(["ééé" * 20]), tmp_path, vocab_size=260, sample_bytes=21).vocab_size == 260


def test_documents_that_change_between_readings(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="changed while they were read"):
        _train(Counted(["to be or not to be " * 9], changes=True), tmp_path, vocab_size=262)
    assert list((tmp_path / "tokenizers").iterdir()) == []


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size is 258; a byte-level BPE needs at least 259"):
        _train(Counted(["text"]), tmp_path, vocab_size=258)
    with pytest.raises(DataError, match=r"too few to learn data.vocab_size=400 tokens: 260 were found"):
        _train(Counted(["aaaa"]), tmp_path, vocab_size=400)
    with pytest.raises(DataError, match="holds no text"):
        _train(Counted([""]), tmp_path)
