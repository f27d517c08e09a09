import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError
from stack_train.data import corpus as corpus_module
from stack_train.data.corpus import Corpus, tokenize
from stack_train.data.pipeline import Pipeline
from stack_train.data.split import text_digest
from stack_train.data.text import TextSource
from stack_train.data.tokenizer import HuggingFaceTokenizer


class Given:
    """A source of given texts."""

    def __init__(self, *texts: str, changes: bool = False) -> None:
        self.texts = texts
        self.changes = changes
        self.readings = 0

    def documents(self) -> Iterator[Document]:
        self.readings += 1
        return (Document(f"{number} é", text) for number, text in enumerate(self.texts))

    def fingerprint(self) -> str:
        return f"{self.texts}{self.readings if self.changes else 0}"


@pytest.fixture
def tokenizer(pipeline: Callable[..., Pipeline]) -> HuggingFaceTokenizer:
    return pipeline().tokenizer


def _documents(corpus: Corpus) -> list[list[int]]:
    return [corpus.tokens[start:end].tolist() for start, end in zip(corpus.offsets, corpus.offsets[1:], strict=False)]


@pytest.mark.parametrize("group_characters", [1, 7, 1000])
def test_holds_each_document_that_has_text(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_characters: int
) -> None:
    monkeypatch.setattr(corpus_module, "_GROUP_CHARACTERS", group_characters)
    corpus = tokenize(Given("the fox", "", "a dog\n", "é"), tokenizer, tmp_path)
    assert _documents(corpus) == [[*tokenizer.encode(text), tokenizer.eos_id] for text in ("the fox", "a dog\n", "é")]
    assert [corpus.name(index) for index in range(3)] == ["0 é", "2 é", "3 é"]
    assert corpus.digests.tolist() == [text_digest(text) for text in ("the fox", "a dog\n", "é")]
    assert corpus.tokens.dtype == np.uint16


def test_is_mapped_from_disk_and_not_read_again(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    source = Given("the fox")
    first, second = tokenize(source, tokenizer, tmp_path), tokenize(source, tokenizer, tmp_path)
    assert source.readings == 1
    assert isinstance(second.tokens, np.memmap)
    assert first.content_digest == second.content_digest


def test_a_large_vocabulary_takes_wider_tokens(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    tokenizer.vocab_size = 65_537
    assert tokenize(Given("the fox"), tokenizer, tmp_path).tokens.dtype == np.uint32


def test_content_digest_does_not_depend_on_where_the_files_lie(
    tokenizer: HuggingFaceTokenizer, texts: Path, tmp_path: Path
) -> None:
    shutil.copytree(texts, tmp_path / "moved", copy_function=shutil.copyfile)
    sources = [TextSource(f"{folder}/**/*.txt") for folder in (texts, tmp_path / "moved")]
    here, there = (tokenize(source, tokenizer, tmp_path) for source in sources)
    assert sources[0].fingerprint() != sources[1].fingerprint()
    assert here.content_digest == there.content_digest
    assert tokenize(Given("other"), tokenizer, tmp_path).content_digest != here.content_digest


def test_content_digest_covers_the_tokens(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    before = tokenize(Given("the fox"), tokenizer, tmp_path).content_digest
    tokenizer.digest = "of another tokenizer"
    encode_batch = tokenizer.encode_batch
    tokenizer.encode_batch = lambda texts: [ids + 1 for ids in encode_batch(texts)]
    assert tokenize(Given("the fox"), tokenizer, tmp_path).content_digest != before


def test_mistakes_are_named_and_leave_nothing(tokenizer: HuggingFaceTokenizer, tmp_path: Path) -> None:
    tmp_path = tmp_path / "other"
    with pytest.raises(DataError, match="changed while they were read"):
        tokenize(Given("text", changes=True), tokenizer, tmp_path)
    with pytest.raises(DataError, match="every document is empty"):
        tokenize(Given("", ""), tokenizer, tmp_path)
    assert list((tmp_path / "corpora").iterdir()) == []
    tokenizer.eos_id = None
    with pytest.raises(DataError, match="no end-of-text token"):
        tokenize(Given("text"), tokenizer, tmp_path)
