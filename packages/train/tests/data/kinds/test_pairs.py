from types import SimpleNamespace

import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.pairs import PairData, TextPair, fitting_pairs

MODEL = SimpleNamespace(vocab_size=300, max_positions=256, start_token=299, name="t5")
RECORDS = [{"source": "ab" * (1 + n % 3), "target": "z" * (1 + n % 4)} for n in range(12)]


@pytest.fixture
def build(make_tokenizer, write_jsonl):
    def build(records=RECORDS, **fields):
        section = {"source": str(write_jsonl(records)), "tokenizer": str(make_tokenizer(None)), "batch_size": 3}
        sizes = {"source_tokens": 10, "target_tokens": 9, "validation_fraction": 0.0}
        config = PairData(**{**section, **sizes, **fields})
        return config, config.build(seed=0, model=MODEL)

    return build


def texts_of(batches, batch):
    """Returns the source and the target of each segment of each row, and checks how they are laid out."""
    found = []
    eos = batches.tokenizer.eos_id
    arrays = [batch[name] for name in ("tokens", "targets", "positions", "segment_ids")]
    for tokens, targets, positions, segments, source, source_segments in zip(
        *arrays, batch["source_tokens"], batch["source_segment_ids"], strict=True
    ):
        assert (targets[segments == 0] == IGNORED_TARGET).all() and not tokens[segments == 0].any()
        assert set(segments) - {0} == set(source_segments) - {0} == set(range(1, segments.max() + 1))
        for segment in range(1, segments.max() + 1):
            own = segments == segment
            assert tokens[own].tolist() == [299, *targets[own][:-1]] and targets[own][-1] == eos
            assert positions[own].tolist() == list(range(own.sum()))
            source_text = batches.tokenizer.decode(source[source_segments == segment].tolist())
            found.append((source_text, batches.tokenizer.decode(targets[own][:-1].tolist())))
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_an_epoch_has_every_pair_once(build, packed):
    config, batches = build(packed=packed, batch_size=1, prefix="q")
    iterator = batches.train_iterator()
    batch_list = [next(iterator) for _ in range(batches.train_rows)]
    found = [pair for batch in batch_list for pair in texts_of(batches, batch)]
    assert sorted(found) == sorted(("q" + each["source"], each["target"]) for each in RECORDS)
    # 12 pairs with 60 tokens of sources and 42 of targets, in rows of 10 and 9.
    assert batches.train_rows == (7 if packed else 12)
    spec = config.spec(MODEL)
    shapes = {name: (array.shape, array.dtype) for name, array in batch_list[0].items() if name in spec}
    assert shapes == {name: (struct.shape, struct.dtype) for name, struct in spec.items()}
    names = batches.describe_rows(batch_list[0]["row_ids"])[0].split("; ")
    assert len(names) == len(texts_of(batches, batch_list[0])) and all("records.jsonl:" in name for name in names)


def test_long_texts_follow_the_policy(build):
    records = [*RECORDS, {"source": "c" * 11, "target": "y"}, {"source": "d", "target": "x" * 9}]
    with pytest.raises(DataError, match=r"2 of 14 pairs .*data\.source_tokens=10 .*jsonl:13 has 11 and 2 tokens"):
        build(records)
    assert sum(len(row) for row in build(records, too_long="drop")[1]._training) == 12
    _, batches = build(records[12:], too_long="cut", packed=False, batch_size=2)
    batch = next(batches.train_iterator())
    assert sorted((batch["source_segment_ids"] == 1).sum(1).tolist()) == [1, 10]
    # A target that was cut has no end.
    assert sorted((batch["targets"] == batches.tokenizer.eos_id).sum(1).tolist()) == [0, 1]
    with pytest.raises(DataError, match="None of 2 pairs fits"):
        build(records[12:], too_long="drop")


def test_a_source_that_is_cut_keeps_its_end():
    sources = [np.asarray(tokens, np.int32) for tokens in ([5, 6, 7, 1], [5, 6, 7, 8], [5, 1])]
    pairs = [TextPair("a", source, np.ones(2, np.int32)) for source in sources]
    kept = fitting_pairs(pairs, 3, 2, "cut", end_token=1)
    assert [pair.source.tolist() for pair in kept] == [[5, 6, 1], [5, 6, 7], [5, 1]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"source": "a", "targets": "b"}, "no field 'target'. Did you mean 'targets'.*Set data.target_field"),
        ({"source": 3, "target": "b"}, "field 'source' holds a int; a string was expected"),
        ({"source": "", "target": "b"}, "the source has no tokens"),
    ],
)
def test_records_that_cannot_be_used_are_refused(build, record, message):
    with pytest.raises(DataError, match=message):
        build([record])


def test_models_that_read_no_sources_are_refused():
    with pytest.raises(ConfigError, match="for encoder-decoders such as t5, not for family 'llama'"):
        PairData(source="none").check(SimpleNamespace(name="llama", max_positions=64))
    with pytest.raises(ConfigError, match=r"data\.source_tokens is 512, but model\.max_positions is 256"):
        PairData(source="none").check(MODEL)


def test_the_start_token_is_part_of_where_the_data_stands(build):
    config, batches = build()
    state = batches.train_iterator().get_state()
    other = config.build(seed=0, model=SimpleNamespace(**{**vars(MODEL), "start_token": 1}))
    with pytest.raises(DataError, match="start_token"):
        other.train_iterator().set_state(state)
    np.testing.assert_array_equal(next(other.train_iterator())["tokens"][:, 0], 1)
