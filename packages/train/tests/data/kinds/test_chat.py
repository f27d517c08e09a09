from types import SimpleNamespace

import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.data import IGNORED_TARGET, Batches, DataConfig
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.chat import ChatData
from stack_train.data.tokenizer import HuggingFaceTokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The end of a turn stands outside of the block, as in templates that were marked by hand.
UNFINISHED = MARKED.replace(
    "{{ m.content }}<|im_end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>"
)
UNSTABLE = "{% for m in messages %}[{{ loop.revindex }} {{ m.role }}] {{ m.content }}<|im_end|>\n{% endfor %}"

MODEL = SimpleNamespace(vocab_size=300, max_positions=256)
TALK = [
    {"role": "user", "content": "two plus two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "and one?"},
    {"role": "assistant", "content": "five"},
]


@pytest.fixture
def build(make_tokenizer, write_jsonl):
    def build(records, template=CHATML, **fields):
        tokenizer = make_tokenizer(template)
        section = {"source": str(write_jsonl(records)), "tokenizer": str(tokenizer), "seq_tokens": 128}
        config = ChatData(**{**section, "batch_size": 2, "validation_fraction": 0.0, **fields})
        return config, config.build(seed=0, model=MODEL)

    return build


def learned(batches, row=0):
    """The text of the targets of a row."""
    batch = next(batches.train_iterator())
    targets = batch["targets"][row]
    tokenizer = batches.tokenizer
    return "".join(tokenizer.token_bytes(int(token)).decode() for token in targets[targets != IGNORED_TARGET])


@pytest.mark.parametrize("template", [CHATML, MARKED, UNFINISHED])
def test_only_the_assistants_tokens_carry_loss_the_end_of_its_turns_included(build, template):
    _, batches = build([{"messages": TALK}], template)
    assert learned(batches) == "four<|im_end|>five<|im_end|>"


def test_targets_are_the_tokens_that_follow(build):
    _, batches = build([{"messages": TALK}])
    batch = {name: array[0] for name, array in next(batches.train_iterator()).items()}
    length = int((batch["segment_ids"] > 0).sum())
    followed = batch["targets"][: length - 1] != IGNORED_TARGET
    np.testing.assert_array_equal(batch["targets"][: length - 1][followed], batch["tokens"][1:length][followed])
    np.testing.assert_array_equal(batch["positions"][:length], np.arange(length))


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": TALK[:1], "completion": [{"role": "assistant", "content": "4"}]},
        {"prompt": TALK[:3], "completion": "4"},
    ],
)
def test_of_prompt_and_completion_the_completion_is_learned(build, record):
    _, batches = build([record])
    assert learned(batches) == "4<|im_end|>"


def test_rows_are_packed_whole_and_each_conversation_is_a_segment(build):
    records = [{"prompt": "a" * n, "completion": "b" * 3} for n in (5, 9, 20, 3, 7)]
    config, batches = build(records, template=None, seq_tokens=32, batch_size=1)
    iterator, seen = batches.train_iterator(), []
    for _ in range(len(batches._training)):
        batch = next(iterator)
        for segment in range(1, int(batch["segment_ids"].max()) + 1):
            inside = batch["segment_ids"][0] == segment
            seen.append(int(inside.sum()))
            assert batch["positions"][0][inside].tolist() == list(range(inside.sum()))
            assert (batch["targets"][0][inside] != IGNORED_TARGET).sum() == 4
    assert sorted(seen) == sorted(n + 3 for n in (5, 9, 20, 3, 7))
    assert len(batches._training) == 2 < len(records)
    assert config.spec(MODEL)["tokens"].shape == batch["tokens"].shape


def test_an_iterator_goes_on_where_its_state_stands(build):
    records = [{"prompt": f"{n}", "completion": f"answer {n}"} for n in range(9)]
    _, batches = build(records, template=None, seq_tokens=16, packed=False)
    first = batches.train_iterator()
    for _ in range(3):
        next(first)
    second = batches.train_iterator()
    second.set_state(first.get_state())
    left, right = next(first), next(second)
    assert all(np.array_equal(left[name], right[name]) for name in left)
    assert batches.describe_rows(left["row_ids"])[0].endswith(tuple(f".jsonl:{n + 1}" for n in range(9)))
    with pytest.raises(DataError, match=r"data\.seq_tokens"):
        build(records, template=None, seq_tokens=32, packed=False)[1].train_iterator().set_state(first.get_state())


def test_some_rows_of_a_batch_are_those_of_the_whole(build):
    records = [{"prompt": f"{n}", "completion": f"answer {n}"} for n in range(9)]
    _, batches = build(records, template=None, seq_tokens=16, packed=False)
    whole, second = next(batches.train_iterator()), next(batches.with_rows(np.array([1])).train_iterator())
    assert all(np.array_equal(second[name], whole[name][1:]) for name in whole if name != "row_ids")
    assert np.array_equal(second["row_ids"], whole["row_ids"])


def test_it_is_data_of_a_run(build, tmp_path):
    config, batches = build([{"messages": TALK}] * 3 + [{"prompt": "x", "completion": "y"}], validation_fraction=0.2)
    assert isinstance(config, DataConfig)
    assert isinstance(batches, Batches)
    (held_out,) = batches.validation_batches()
    assert held_out["tokens"].shape == (2, 128) and (held_out["segment_ids"][1] == 0).all()
    batches.write(tmp_path)
    assert HuggingFaceTokenizer.load(tmp_path / "tokenizer").vocab_size == 258


def test_the_template_that_a_run_is_trained_with_stays_with_its_tokenizer(build, tmp_path):
    (tmp_path / "mine.jinja").write_text(MARKED)
    _, batches = build([{"messages": TALK}], template=None, chat_template=str(tmp_path / "mine.jinja"))
    run = tmp_path / "run"
    run.mkdir()
    batches.write(run)
    assert HuggingFaceTokenizer.load(run / "tokenizer").chat_template == MARKED


@pytest.mark.parametrize(
    ("records", "fields", "message"),
    [
        ([{"messages": TALK}], {"template": UNSTABLE}, r"jsonl:1: the chat template renders .* turn 1"),
        ([{"messages": TALK}], {"template": None}, r"jsonl:1 holds messages, but the tokenizer has no chat template"),
        ([{"text": "x"}], {}, r"jsonl:1: the record has neither a list 'messages' .* Its fields: 'text'"),
        ([{"messages": TALK[:1]}], {}, r"jsonl:1: the conversation has no text by the assistant"),
        ([{"prompt": "a" * 99, "completion": "b"}], {"seq_tokens": 50}, r"1 of 1 examples .* has 101 tokens.*too_long"),
        ([{"prompt": "a" * 99, "completion": "b"}], {"seq_tokens": 50, "too_long": "drop"}, "None of 1 examples fits"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(build, records, fields, message):
    with pytest.raises(DataError, match=message):
        build(records, **fields)


def test_a_cut_keeps_the_beginning(build):
    _, batches = build([{"prompt": "a" * 40, "completion": "b" * 40}], template=None, seq_tokens=50, too_long="cut")
    assert learned(batches) == "b" * 11


def test_a_tokenizer_is_needed_and_must_fit(build, write_jsonl):
    source = str(write_jsonl([{"messages": TALK}]))
    with pytest.raises(ConfigError, match=r"needs a tokenizer: set data\.tokenizer"):
        ChatData(source=source).build(seed=0, model=MODEL)
    with pytest.raises(ConfigError, match=r"max_positions is 256"):
        ChatData(source=source, seq_tokens=300).check(MODEL)
    with pytest.raises(ConfigError, match="Did you mean 'source'"):
        parse(ChatData, {"sources": source})
