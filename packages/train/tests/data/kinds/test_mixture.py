"""Mixtures of sources: exact shares, an order that depends only on the seed, and rows read once by all readers."""

import json
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.chat import ChatData
from stack_train.data.kinds.text import TextData
from stack_train.data.mixture import MixedBatches, Selection
from stack_train.run.source_files import source_files

MODEL = SimpleNamespace(vocab_size=400, max_positions=256)
WEIGHTS = {"web": 0.62, "code": 0.311, "maths": 0.069}

Build = Callable[..., MixedBatches]


@pytest.fixture
def mixed(tmp_path: Path) -> Build:
    """Builds a mixture of three sources of different sizes; keywords are fields of the config, or the seed."""
    words = {"web": "the fox", "code": "def fox():", "maths": "one plus two"}
    for size, (name, text) in enumerate(words.items(), start=1):
        lines = (json.dumps({"text": f"{text} {number} " * 6}) for number in range(20 * size))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")

    def build(*, seed: int = 0, weights: Mapping[str, float] = WEIGHTS, **fields: Any) -> MixedBatches:
        mix = {name: {"source": f"jsonl:{tmp_path}/{name}.jsonl", "weight": weight} for name, weight in weights.items()}
        small = {"vocab_size": 280, "seq_tokens": 16, "batch_size": 8, "prefetch_batches": 0}
        config = parse(TextData, {**small, "mix": mix, **fields})
        config.check(MODEL)
        built = config.build(seed=seed, model=MODEL, cache_dir=tmp_path / "cache")
        assert isinstance(built, MixedBatches)
        return built

    return build


@pytest.mark.parametrize("weights", [(0.62, 0.311, 0.069), (1, 1.0099), (5, 3, 2), (1e-3, 0.999), (7,)])
def test_shares_are_the_weights_over_ten_thousand_batches(weights: tuple[float, ...]) -> None:
    selection = Selection({f"s{number}": float(weight) for number, weight in enumerate(weights)})
    sources, positions = selection.select(np.arange(10_000 * 8))
    shares = np.bincount(sources, minlength=len(weights)) / len(sources)
    np.testing.assert_allclose(shares, np.asarray(weights) / sum(weights), atol=2e-5)
    for number in range(len(weights)):
        np.testing.assert_array_equal(positions[sources == number], np.arange((sources == number).sum()))
    # Nowhere along the way is a source ahead or behind by more than the number of sources.
    counts = selection.counts(np.arange(1, 5000))
    expected = np.arange(1, 5000)[:, None] * selection.parts / (1 << 20)
    assert np.abs(counts - expected).max() <= len(weights)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, (1 << 47)))
def test_the_source_of_a_row_is_a_function_of_its_position(weights: list[float], start: int) -> None:
    selection = Selection({str(number): weight for number, weight in enumerate(weights)})
    sources, positions = selection.select(np.arange(start, start + 50))
    for place in (0, 17, 49):
        one, position = selection.select(np.asarray([start + place]))
        assert (one[0], position[0]) == (sources[place], positions[place])
    np.testing.assert_array_equal(selection.counts(np.asarray([start + 50])).sum(), start + 50)


def test_a_mixture_resumes_anywhere_and_reads_every_row_of_an_epoch_once(mixed: Build) -> None:
    built = mixed()
    batches = list(islice(built.train_iterator(), 120))
    for before in (1, 7, 60):
        iterator = built.train_iterator()
        iterator.set_state({"fingerprint": json.loads(json.dumps(built.fingerprint)), "batches": before})
        for expected, found in zip(batches[before:], islice(iterator, 5), strict=False):
            assert all(np.array_equal(expected[name], found[name]) for name in expected)
    row_ids = np.concatenate([batch["row_ids"] for batch in batches])
    for number, (name, source) in enumerate(built.sources.items()):
        rows = row_ids[row_ids % 3 == number] // 3
        assert (
            np.all(np.sort(rows[: source.train_rows]) == np.arange(source.train_rows)[: len(rows)]) or name == "maths"
        )
        assert len(set(rows.tolist())) == len(rows)
    assert set(row_ids.tolist()) != set(
        np.concatenate([b["row_ids"] for b in islice(mixed(seed=1).train_iterator(), 120)])
    )


def test_rows_are_of_their_source_and_are_named(mixed: Build) -> None:
    built = mixed()
    for batch in [*islice(built.train_iterator(), 6), *built.validation_batches()]:
        names = list(built.sources)
        for place, (row_id, text) in enumerate(
            zip(batch["row_ids"], built.describe_rows(batch["row_ids"]), strict=True)
        ):
            name = names[row_id % 3 if row_id >= 0 else (-1 - row_id) % 3]
            assert text.startswith(f"{name}: ") and f"{name}.jsonl:" in text
            if (batch["segment_ids"][place] > 0).all():
                words = built.tokenizer.decode(batch["tokens"][place].tolist())
                assert {"web": "fox", "code": "def", "maths": "plus"}[name][:2] in words


def test_metrics_are_the_shares_and_epochs_of_the_batches_read(mixed: Build) -> None:
    built = mixed()
    iterator = built.train_iterator()
    rows = np.concatenate([next(iterator)["row_ids"] for _ in range(50)])
    counts = np.bincount(rows % 3)
    expected = {}
    for number, (name, source) in enumerate(built.sources.items()):
        expected |= {f"{name}_share": counts[number] / 400, f"{name}_epochs": counts[number] / source.train_rows}
    assert iterator.data_metrics() == pytest.approx(expected)
    assert expected["web_share"] == pytest.approx(0.62, abs=0.005)


def test_four_then_two_then_eight_readers_see_each_row_once(mixed: Build) -> None:
    whole = mixed()
    expected = list(islice(whole.train_iterator(), 12))
    state, first = None, 0
    for readers, batches in ((4, 5), (2, 4), (8, 3)):
        iterators = [whole.with_rows(rows).train_iterator() for rows in np.split(np.arange(8), readers)]
        for iterator in iterators:
            if state is not None:
                iterator.set_state(state)
        for batch in expected[first : first + batches]:
            parts = [next(iterator) for iterator in iterators]
            for name in ("tokens", "targets", "positions", "segment_ids"):
                np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), batch[name])
            assert all(np.array_equal(part["row_ids"], batch["row_ids"]) for part in parts)
        states = [iterator.get_state() for iterator in iterators]
        assert all(each == states[0] for each in states)
        state, first = json.loads(json.dumps(states[0])), first + batches


def test_a_state_of_other_weights_or_sources_is_refused(mixed: Build) -> None:
    state = mixed().train_iterator().get_state()
    with pytest.raises(DataError, match=r"(?s)belongs to different data.*the shares of data.mix"):
        mixed(weights={**WEIGHTS, "web": 0.5}).train_iterator().set_state(state)
    with pytest.raises(DataError, match=r"(?s)belongs to different data.*maths: the documents"):
        mixed(weights={"web": 2, "code": 1}).train_iterator().set_state(state)


def test_settings_that_contradict_a_mixture_are_refused(mixed: Build) -> None:
    with pytest.raises(
        ConfigError, match=r"data.source is 'text:x', but the sources are in data.mix \(web, code, maths"
    ):
        mixed(source="text:x")
    with pytest.raises(ConfigError, match=r"data.mix.code.weight is 1e-09, less than a millionth"):
        mixed(weights={"web": 1.0, "code": 1e-9})
    with pytest.raises(ConfigError, match=r"data.mix names a source 'my web'; expected letters, digits"):
        mixed(weights={"my web": 1.0})
    with pytest.raises(ConfigError, match="weight"):
        mixed(weights={"web": 0.0, "code": 1})
    with pytest.raises(ConfigError, match=r"data.source is not set. Set it to a glob of JSONL files, or set data.mix"):
        ChatData(seq_tokens=64).check(MODEL)
    mix = {"a": {"source": "x", "text_field": "body"}}
    with pytest.raises(ConfigError, match=r"data.mix.a.text_field is 'body', but the sources are"):
        parse(ChatData, {"mix": mix, "seq_tokens": 64}).check(MODEL)


def test_chats_are_mixed_packed_and_unpacked(tmp_path: Path, make_tokenizer: Callable[[str], Path]) -> None:
    for name, count in (("short", 30), ("long", 12)):
        records = ({"prompt": f"{name} {number}?", "completion": name * 3} for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    mix = {
        name: {"source": f"{tmp_path}/{name}.jsonl", "weight": weight} for name, weight in (("short", 3), ("long", 1))
    }
    for packed in (True, False):
        section = {"mix": mix, "tokenizer": str(make_tokenizer("x")), "seq_tokens": 64, "packed": packed}
        config = parse(ChatData, section)
        config.check(MODEL)
        built = config.build(seed=0, model=MODEL)
        described = [
            text.split(": ")[0]
            for b in islice(built.train_iterator(), 10)
            for text in built.describe_rows(b["row_ids"])
        ]
        assert (described.count("short"), described.count("long")) == (60, 20)
    sizes = source_files(config)
    assert sizes == {str(path): path.stat().st_size for path in tmp_path.glob("*.jsonl")}
