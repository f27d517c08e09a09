"""Every field of data of texts changes the batches, or is listed here with its reason."""

import dataclasses
import shutil
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.errors import ConfigError, StackError
from stack_core.abi.policy import PolicyBatches
from stack_train.data.kinds.chat import ChatData
from stack_train.data.kinds.judged import JudgedData
from stack_train.data.kinds.pairs import PairData
from stack_train.data.kinds.preferences import PreferenceData
from stack_train.data.kinds.text import TextData

ELSEWHERE = {
    "name": "the registry is chosen by it",
    "prefetch_batches": "batches are the same, and come sooner (test_pipeline)",
    "mix": "takes the place of the source (test_mixture)",
}
MODEL = SimpleNamespace(vocab_size=300, max_positions=256, start_token=0)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% if m.role != 'user' %}<|im_end|>{% endif %}{% endfor %}"
)
NUMBERS = range(12)


def said(role, text):
    return [{"role": role, "content": text}]


def record(number, **answers):
    """Returns a prompt with answers, those of number 9 of 20 characters or more."""
    text = str(number) * (20 if number == 9 else 1 + number % 3)
    given = {name: said("assistant", text + letter) if letter else number % 2 == 0 for name, letter in answers.items()}
    return {"prompt": said("user", f"{number}?"), **given}


RECORDS = {
    TextData: [{"text": f"{n} of many words " * (1 + n % 5), "other": f"{n * n} others " * 3} for n in NUMBERS],
    ChatData: [record(n, completion="y") for n in NUMBERS],
    PreferenceData: [record(n, chosen="y", rejected="n") for n in NUMBERS],
    JudgedData: [record(n, completion="y", label="") for n in NUMBERS],
    PairData: [{"source": f"{n}?", "target": f"{n}" * (9 if n == 9 else 2), "other": f"{n}!"} for n in NUMBERS],
}
VALUES = {
    "text_field": "other",
    "vocab_size": 270,
    "tokenizer_bytes": 40,
    "packing": "best_fit",
    "packed": False,
    "seq_tokens": 24,
    "batch_size": 3,
    "validation_fraction": 0.5,
    "reference": False,
    "source_field": "other",
    "target_field": "other",
    "prefix": "p: ",
    "source_tokens": 16,
    "target_tokens": 9,
}


def score(params, batch):
    return {"logprobs": np.where(batch["targets"] != IGNORED_TARGET, -params, 0).astype(np.float32)}


def made(config):
    """Returns the first batches and those that are held out; or the refusal."""
    try:
        config.check(MODEL)
        data = config.build(seed=0, model=MODEL)
        if isinstance(data, PolicyBatches):
            data.update_weights(2.0, 0, score)
        batches = [*islice(data.train_iterator(), 3), *data.validation_batches()]
    except StackError as error:
        return str(error)
    return [{name: array.tolist() for name, array in sorted(batch.items())} for batch in batches]


@pytest.mark.parametrize("config_class", list(RECORDS))
def test_every_field_changes_the_batches(config_class, make_tokenizer, write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    records = RECORDS[config_class]
    sizes = {"source_tokens": 12, "target_tokens": 8} if config_class is PairData else {"seq_tokens": 20}
    base = {**sizes, "batch_size": 2, "validation_fraction": 0.25, "source": str(write_jsonl(records))}
    (other := tmp_path / "other").mkdir()
    (other / "records.jsonl").write_bytes((tmp_path / base["source"]).read_bytes().replace(b"0", b"8"))
    (tmp_path / "template").write_text(TEMPLATE.replace(".content", ".content | upper"))
    shutil.copytree(make_tokenizer(None), tmp_path / "without")
    values = VALUES | {
        "source": str(other / "records.jsonl"),
        "tokenizer": str(tmp_path / "without"),
        "chat_template": str(tmp_path / "template"),
    }
    if config_class is PairData:
        (tmp_path / "without" / "tokenizer_config.json").write_text('{"eos_token": "<|im_start|>"}')
    if config_class is TextData:
        base = base | {"source": f"jsonl:{base['source']}", "vocab_size": 264}
        values["source"] = f"jsonl:{values['source']}"
    else:
        base |= {"tokenizer": str(make_tokenizer(TEMPLATE)), "too_long": "cut"}
    expected = made(config_class(**base))
    assert not isinstance(expected, str), expected
    fields = [field.name for field in dataclasses.fields(config_class) if field.name not in ELSEWHERE]
    changes = [{field: values[field]} for field in fields if field != "too_long"]
    changes += [{"too_long": other} for other in ("drop", "error") if "too_long" in fields]
    for change in changes:
        found = made(config_class(**base | change))
        assert found != expected, f"{change} has no effect"
        assert not isinstance(found, str) or next(iter(change)) in found, f"{change} is refused by {found}"


def test_a_size_of_a_tokenizer_that_is_there_is_refused():
    with pytest.raises(ConfigError, match=r"is 'runs/a', so data\.tokenizer_bytes would have no effect"):
        TextData(tokenizer="runs/a", tokenizer_bytes=100, seq_tokens=16).check(MODEL)
