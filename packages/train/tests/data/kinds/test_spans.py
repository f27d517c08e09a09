import json
from types import SimpleNamespace

import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.spans import SpanData, corrupt_spans

MODEL = SimpleNamespace(vocab_size=300, max_positions=256, start_token=299, name="t5")
SENTINELS = [258, 259, 260, 261, 262]


@pytest.fixture
def build(make_tokenizer, tmp_path, monkeypatch):
    """Builds data with byte tokens, whose sentinels are special tokens."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_tokenizer(None) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    names = {f"<extra_id_{number}>": token for number, token in enumerate(SENTINELS)}
    names |= {f"<other_{number}>": 263 + number for number in range(5)}
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": token, "content": name} for name, token in names.items()
    ]
    path.write_text(json.dumps(tokenizer))
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("".join(chr(97 + (number + place) % 26) for place in range(70)))

    def build(**fields):
        section = {"source": f"text:{tmp_path}/*.txt", "tokenizer": str(path), "seq_tokens": 32, "batch_size": 2}
        config = SpanData(
            **{**section, "noise_density": 0.25, "span_tokens": 2.0, "validation_fraction": 0.3, **fields}
        )
        config.check(MODEL)
        return config, config.build(seed=3, model=MODEL)

    return build


def whole(source, target):
    """Puts the spans of a target back into its source."""
    spans, found = {}, []
    for token in target.tolist():
        if token in SENTINELS:
            spans[token] = found = []
        else:
            found.append(token)
    return [each for token in source.tolist() for each in (spans[token] if token in SENTINELS else [token])]


@pytest.mark.parametrize(("tokens", "noise", "spans"), [(31, 8, 4), (5, 2, 2), (9, 8, 1), (2, 1, 1), (1, 0, 0)])
def test_source_and_target_make_the_text(tokens, noise, spans):
    text = np.arange(tokens, dtype=np.int32)
    found = [corrupt_spans(text, noise, spans, SENTINELS, np.random.default_rng(seed)) for seed in range(20)]
    for source, target in found:
        assert whole(source, target) == text.tolist()
        assert (len(source), len(target)) == (tokens - noise + spans, noise + spans)
        assert [token for token in source if token in SENTINELS] == SENTINELS[:spans]
    assert len({source.tobytes() for source, _ in found}) > 5 or spans < 3


def test_rows_are_full_and_later_epochs_have_other_spans(build):
    config, batches = build()
    assert config.row_tokens() == (32 - 8 + 4 + 1, 8 + 4 + 1)
    rows = np.arange(batches.train_rows)
    first, second = batches.train_batch(rows), batches.train_batch(rows + len(rows))
    eos = batches.tokenizer.eos_id
    for batch, row_ids in ((first, rows), (second, rows + len(rows))):
        texts = batches._pipeline.train_batch(row_ids)
        for row in rows:
            real = texts["segment_ids"][row] > 0
            source = batch["source_tokens"][row][batch["source_segment_ids"][row] == 1]
            target = batch["targets"][row][batch["targets"][row] != IGNORED_TARGET]
            assert source[-1] == target[-1] == eos
            assert whole(source[:-1], target[:-1]) == texts["tokens"][row][real].tolist()
            assert batch["tokens"][row][: len(target)].tolist() == [299, *target[:-1]]
    assert not np.array_equal(first["source_tokens"], second["source_tokens"])
    np.testing.assert_array_equal(first["source_tokens"], batches.train_batch(rows)["source_tokens"])
    spec = config.spec(MODEL)
    batch = next(batches.train_iterator())
    assert {name: array.shape for name, array in batch.items() if name in spec} == {
        name: struct.shape for name, struct in spec.items()
    }


def test_held_out_rows_are_the_same_at_each_call(build):
    _, batches = build(batch_size=64)
    (first,), (second,) = batches.validation_batches(), batches.validation_batches()
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name], err_msg=name)
    # Rows behind the last one are padding.
    assert (first["segment_ids"][0] == 1).any() and not first["segment_ids"][-1].any()
    assert (first["targets"][-1] == IGNORED_TARGET).all()


def test_every_field_changes_the_batches(build):
    def made(**fields):
        _, batches = build(**fields)
        found = [next(batches.train_iterator()), *batches.validation_batches()]
        return [{name: array.tolist() for name, array in batch.items()} for batch in found]

    changes = {"noise_density": 0.3, "span_tokens": 4.0, "sentinel": "<other_{}>", "seq_tokens": 24, "batch_size": 3}
    expected = made()
    for name, value in {**changes, "validation_fraction": 0.6}.items():
        assert made(**{name: value}) != expected, name


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"seq_tokens": 64}, DataError, "has 8 spans, and the tokenizer has no token '<extra_id_5>'"),
        ({"sentinel": "<extra>"}, ConfigError, "expected one {}, as in '<extra_id_{}>'"),
        ({"tokenizer": None}, ConfigError, "needs a tokenizer with sentinel tokens"),
        ({"seq_tokens": 512}, ConfigError, r"data\.source_tokens is 449, but model\.max_positions is 256"),
    ],
)
def test_settings_that_do_not_work_are_refused(build, fields, error, message):
    with pytest.raises(error, match=message):
        build(**fields)
