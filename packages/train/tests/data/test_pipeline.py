import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.text import TextData
from stack_train.data.pipeline import Batch, Pipeline, build_pipeline

Build = Callable[..., Pipeline]


def _take(pipeline: Pipeline, batches: int) -> list[Batch]:
    iterator = pipeline.train_iterator()
    taken = list(islice(iterator, batches))
    iterator.close()
    return taken


def _equal(ours: list[Batch], theirs: list[Batch]) -> bool:
    return len(ours) == len(theirs) and all(
        np.array_equal(one[name], other[name]) for one, other in zip(ours, theirs, strict=True) for name in one | other
    )


def _texts(pipeline: Pipeline, batches: Iterator[Batch] | list[Batch]) -> set[str]:
    """The names of the documents of batches."""
    descriptions = [text for batch in batches for text in pipeline.describe_rows(batch["row_ids"])]
    return {piece.split(" (")[0] for text in descriptions for piece in text.split("; ")}


def test_a_batch_has_the_shapes_that_a_trainer_expects(pipeline: Build) -> None:
    (batch,) = _take(pipeline(seq_tokens=16, batch_size=3), 1)
    kinds = {name: (values.shape, values.dtype) for name, values in batch.items()}
    rows = ((3, 16), np.dtype(np.int32))
    assert kinds == {
        "tokens": rows,
        "targets": rows,
        "positions": rows,
        "segment_ids": rows,
        "row_ids": ((3,), np.dtype(np.int64)),
    }


def test_the_rows_of_each_process_make_the_batch_of_one(pipeline: Build) -> None:
    whole, parts = pipeline(batch_size=3), [np.array([0, 2]), np.array([1])]
    for batch, *shares in zip(*(_take(each, 9) for each in (whole, *map(whole.with_rows, parts))), strict=True):
        for rows, share in zip(parts, shares, strict=True):
            assert all(np.array_equal(share[name], batch[name][rows]) for name in batch if name != "row_ids")
            assert np.array_equal(share["row_ids"], batch["row_ids"])
    one, other = whole.train_iterator(), whole.with_rows(parts[0]).train_iterator()
    next(other)
    one.set_state(other.get_state())
    assert np.array_equal(next(one)["tokens"][parts[0]], next(other)["tokens"])


def test_each_epoch_holds_every_row_once_in_another_order(pipeline: Build) -> None:
    built = pipeline(batch_size=1)
    row_ids = np.concatenate([batch["row_ids"] for batch in _take(built, 3 * built.train_rows)])
    for epoch in range(3):
        ids = row_ids[epoch * built.train_rows :][: built.train_rows]
        assert sorted(ids) == list(range(epoch * built.train_rows, (epoch + 1) * built.train_rows))
        assert list(ids) != sorted(ids)
    assert list(row_ids[: built.train_rows]) != list(row_ids[built.train_rows :][: built.train_rows] - built.train_rows)


def test_batches_go_on_across_the_end_of_an_epoch(pipeline: Build) -> None:
    built = pipeline(batch_size=4)
    crossing = _take(built, 1 + built.train_rows // 4)[-1]
    assert {int(row_id) // built.train_rows for row_id in crossing["row_ids"]} == (
        {0, 1} if built.train_rows % 4 else {1}
    )


def test_no_document_is_in_both_training_and_validation(pipeline: Build) -> None:
    built = pipeline()
    training = _texts(built, _take(built, -(-built.train_rows // 4)))
    validation = _texts(built, built.validation_batches())
    assert len(validation) == 8
    assert not training & validation
    assert len(training | validation) == 40


def test_validation_is_the_same_each_time_and_counts_every_target_once(pipeline: Build) -> None:
    built = pipeline(batch_size=5)
    batches = list(built.validation_batches())
    assert _equal(batches, list(built.validation_batches()))
    assert len(batches) == built.validation_batch_count
    assert {batch["tokens"].shape for batch in batches} == {(5, 32)}
    assert sum(int((batch["targets"] != IGNORED_TARGET).sum()) for batch in batches) == built.validation_targets
    for batch in batches:
        np.testing.assert_array_equal(batch["targets"] == IGNORED_TARGET, batch["segment_ids"] == 0)


def test_without_validation_there_are_no_batches(pipeline: Build) -> None:
    built = pipeline(validation_fraction=0.0)
    assert list(built.validation_batches()) == []
    assert built.validation_batch_count == 0


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": "the fox " * (number % 7)}) for number in range(60)]
    (folder / "records.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


@settings(max_examples=30)  # each of which builds a pipeline
@given(
    seq_tokens=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    prefetch_batches=st.integers(0, 3),
    before=st.integers(0, 40),
    seed=st.integers(0, 2**40),
)
def test_a_resumed_iterator_goes_on_where_it_was(
    corpus_folder: Path, seq_tokens: int, batch_size: int, prefetch_batches: int, before: int, seed: int
) -> None:
    config = TextData(
        source=f"jsonl:{corpus_folder}/*",
        vocab_size=262,
        validation_fraction=0.1,
        seq_tokens=seq_tokens,
        batch_size=batch_size,
        prefetch_batches=prefetch_batches,
    )
    built = build_pipeline(config, seed=seed, cache_dir=corpus_folder / "cache")
    iterator = built.train_iterator()
    for _ in range(before):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    expected = list(islice(iterator, 4))
    resumed = built.train_iterator()
    next(resumed)
    resumed.set_state(state)
    assert _equal(list(islice(resumed, 4)), expected)
    assert resumed.get_state() == iterator.get_state()
    iterator.close()
    resumed.close()


def test_the_order_of_rows_stays_the_same_in_later_releases(pipeline: Build, tmp_path: Path) -> None:
    """A saved position is worth nothing if the order that it counts in changes."""
    (tmp_path / "characters.txt").write_text("x" * 75, encoding="utf-8")
    source = {"source": f"text:{tmp_path}/*.txt", "vocab_size": 259, "validation_fraction": 0.0}
    (batch,) = _take(pipeline(**source, seq_tokens=10, batch_size=16, seed=7), 1)
    assert batch["row_ids"].tolist() == [3, 7, 2, 1, 0, 4, 6, 5, 10, 8, 12, 11, 13, 14, 9, 15]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed: 1, not 0"),
        ({"seq_tokens": 16}, "data.seq_tokens: 16, not 32"),
        ({"batch_size": 2}, "data.batch_size: 2, not 4"),
        ({"validation_fraction": 0.1}, "data.validation_fraction: 0.1, not 0.2"),
        ({"vocab_size": 270}, "the tokenizer"),
        ({"tokenizer_bytes": 2000}, "the tokenizer"),
    ],
)
def test_a_state_of_other_data_is_refused(pipeline: Build, change: dict[str, object], named: str) -> None:
    state = pipeline().train_iterator().get_state()
    other = pipeline(**change).train_iterator()
    with pytest.raises(DataError, match=f"(?s)belongs to different data.*{named}"):
        other.set_state(state)


def test_a_state_of_other_documents_is_refused(pipeline: Build, texts: Path, tmp_path: Path) -> None:
    first = pipeline()
    first.tokenizer.save(tmp_path / "tokenizer")
    other = pipeline(source=f"text:{texts}/part0/*", tokenizer=str(tmp_path / "tokenizer"))
    with pytest.raises(
        DataError,
        match=r"(?s)Differences \(current, not saved\):\n  the documents \(digest\): '\w+', not '\w+'\nRestore",
    ):
        other.train_iterator().set_state(first.train_iterator().get_state())


def test_prefetching_changes_no_batch_and_may_differ_on_resume(pipeline: Build) -> None:
    eager, lazy = pipeline(prefetch_batches=3), pipeline(prefetch_batches=0)
    assert _equal(_take(eager, 5), _take(lazy, 5))
    assert eager.fingerprint == lazy.fingerprint


@pytest.mark.parametrize("state", [{}, None, {"next_index": 3}, {"fingerprint": {}, "batches": 1, "more": 1}])
def test_what_is_no_state_is_refused(pipeline: Build, state: object) -> None:
    with pytest.raises(DataError, match="is not the state of a training iterator"):
        pipeline().train_iterator().set_state(state)


def test_rows_are_described_by_file_and_lines(pipeline: Build, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("aa\nbb\ncc\ndd\n", encoding="utf-8")
    built = pipeline(source=f"text:{path}", vocab_size=259, validation_fraction=0.0, seq_tokens=7, batch_size=1)
    assert built.train_rows == 2  # <bos> and 12 characters; the end of the text is a target only
    assert built.describe_rows(np.array([0, 1])) == [f"{path} (lines 1-3)", f"{path} (lines 3-5)"]


def test_tokenizer_by_path(pipeline: Build, tmp_path: Path) -> None:
    trained = pipeline()
    trained.tokenizer.save(tmp_path / "tokenizer")
    loaded = pipeline(tokenizer=str(tmp_path / "tokenizer"), vocab_size=None)
    assert _equal(_take(trained, 2), _take(loaded, 2))
    assert loaded.fingerprint == trained.fingerprint
    with pytest.raises(ConfigError, match=r"data.vocab_size is 300, but tokenizer .* has 280"):
        pipeline(tokenizer=str(tmp_path / "tokenizer"), vocab_size=300)


def test_text_field_chooses_what_is_read(pipeline: Build, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "aa", "body": "bbbb"}', encoding="utf-8")
    small = {"source": f"jsonl:{path}", "vocab_size": 259, "validation_fraction": 0.0}
    assert pipeline(**small).train_targets == 3
    assert pipeline(**small, text_field="body").train_targets == 5


@pytest.mark.usefixtures("small_stdlib")
def test_default_is_the_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = build_pipeline(TextData(vocab_size=300, tokenizer_bytes=50_000, seq_tokens=4096), seed=0)
    assert built.tokenizer.vocab_size == 300
    assert built.train_targets > 100_000
    assert (tmp_path / "stack" / "corpora").is_dir()
    (batch,) = _take(built, 1)
    text = built.tokenizer.decode(batch["tokens"][0].tolist())
    assert all(name.split(" (")[0].endswith(".py") for name in built.describe_rows(batch["row_ids"][:1])[0].split("; "))
    assert "import" in text or "def" in text
