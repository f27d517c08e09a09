"""Runs that start from others: the model and the tokenizer are the source's, and what differs is named."""

import json
import re

import pytest

from stack_core.config import load_yaml, parse
from stack_core.errors import ConfigError
from stack_train.run.config import RunConfig
from stack_train.run.start import with_model_of_start
from stack_train.run.train import train

MODEL = {"family": "llama", "vocab_size": 280, "layers": 1, "embed": 16, "heads": 2, "mlp": 24, "rope_theta": 5e4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("start")
    (root / "a.txt").write_text("one two three four five six seven eight nine ten " * 40)
    (root / "b.txt").write_text("ten nine eight seven six five four three two one zero " * 40)
    return root


def mapping(folder, output, source="a", **sections):
    data = {"source": f"text:{folder}/{source}.txt", "seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0}
    base = {"model": MODEL, "data": data, "run": {"steps": 4}, "output": str(folder / output)}
    return {**base, **sections}


@pytest.fixture(scope="module")
def source(folder):
    train(parse(RunConfig, mapping(folder, "source", run={"steps": 20}, optimizer={"learning_rate": 0.03})))
    return str(folder / "source")


def test_model_and_tokenizer_are_those_of_the_source(folder, source):
    start = {"steps": 1, "init_from": source}
    config = parse(RunConfig, with_model_of_start(mapping(folder, "same", run=start, model={"remat": "full"})))
    assert (config.model.rope_theta, config.model.embed, config.model.remat) == (5e4, 16, "full")
    train(config)
    kept, made = (folder / name / "tokenizer" / "tokenizer.json" for name in ("source", "same"))
    assert kept.read_bytes() == made.read_bytes()
    first = json.loads((folder / "same" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first < 4.0  # a model that has learned nothing starts near log(280) = 5.6


def test_numerics_that_shapes_do_not_show_are_named(folder, source):
    start = {"steps": 1, "init_from": source}
    other = parse(RunConfig, mapping(folder, "other", run=start, model={**MODEL, "rope_theta": 1e4}))
    with pytest.raises(ConfigError, match=r"not that of .*\n  model\.rope_theta: 10000\.0, not 50000\.0\n.*--allow"):
        train(other)
    assert not (folder / "other").exists()
    assert train(other, allow=["model.rope_theta"]).step == 1


def test_a_resumed_run_may_change_what_is_allowed_and_notes_it(folder, source):
    train(parse(RunConfig, mapping(folder, "changed")))
    rate = {"learning_rate": 1e-4}
    changed = parse(RunConfig, mapping(folder, "changed", "b", optimizer=rate, run={"steps": 6}))
    choices = folder / "changed" / "ops.json"
    before = [
        {**entry, "implementation": f"other {entry['implementation']}"} for entry in json.loads(choices.read_text())
    ]
    choices.write_text(json.dumps([entry for entry in before if entry["op"] == "norm"]))
    with pytest.raises(ConfigError, match=r"data\.source.*\n.*optimizer\.learning_rate.*\n.*--allow data\.source"):
        train(changed, resume=True)
    assert train(changed, resume=True, allow=["data.source", "optimizer.learning_rate"]).step == 6
    (note,) = map(json.loads, (folder / "changed" / "changes.jsonl").read_text().splitlines())
    of_ops = [line for line in note["changes"] if line.startswith("ops.")]
    of_config = [line.partition(":")[0] for line in note["changes"] if line not in of_ops]
    assert of_config == ["data.source", "optimizer.learning_rate"]
    assert of_ops and all(re.fullmatch(r"ops\.norm .*: (.+), was other \1", line) for line in of_ops)
    assert {entry["op"] for entry in json.loads(choices.read_text())} >= {"attention", "norm"}
    assert load_yaml(folder / "changed" / "config.yaml")["optimizer"]["learning_rate"] == 1e-4


def test_the_smallest_config_is_a_run():
    config = parse(RunConfig, {"output": "runs/smallest", "model": {"family": "llama"}})
    config.data.check(config.model)
