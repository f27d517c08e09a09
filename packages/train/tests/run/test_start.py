"""Runs that start from others: the model and the tokenizer are the source's, and what differs is named."""

import dataclasses
import json
import re
import shutil

import pytest

from stack_core.abi.config import load_yaml, parse
from stack_core.abi.errors import ConfigError, RunDirectoryError
from stack_train.run.checks import check
from stack_train.run.config import RunConfig, run_config
from stack_train.run.resolve import parse_run, resolve
from stack_train.run.run import build
from stack_train.run.train import train

MODEL = {"name": "llama", "vocab_size": 280, "layers": 1, "embed": 16, "heads": 2, "mlp": 24, "rope_theta": 5e4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("start")
    (root / "a.txt").write_text("one two three four five six seven eight nine ten " * 40)
    (root / "b.txt").write_text("ten nine eight seven six five four three two one zero " * 40)
    return root


def mapping(folder, output, source="a", data=None, **sections):
    sizes = {"seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0}
    data = {"source": f"text:{folder}/{source}.txt", **sizes, **(data or {})}
    base = {"model": MODEL, "data": data, "run": {"steps": 4}, "output": str(folder / output)}
    return {**base, **sections}


@pytest.fixture(scope="module")
def source(folder):
    train(parse(RunConfig, mapping(folder, "source", run={"steps": 20}, optimizer={"learning_rate": 0.03})))
    return str(folder / "source")


def test_model_and_tokenizer_are_those_of_the_source(folder, source):
    start = {"steps": 1, "init_from": source}
    config = parse_run(mapping(folder, "same", run=start, model={"remat": "full"}))
    assert (config.model.rope_theta, config.model.embed, config.model.remat) == (5e4, 16, "full")
    train(config)
    kept, made = (folder / name / "tokenizer" / "tokenizer.json" for name in ("source", "same"))
    assert kept.read_bytes() == made.read_bytes()
    first = json.loads((folder / "same" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert first < 4.0  # a model that has learned nothing starts near log(280) = 5.6


def test_numerics_that_shapes_do_not_show_are_named(folder, source):
    start = {"steps": 1, "init_from": source}
    other = parse(RunConfig, mapping(folder, "other", run=start, model={**MODEL, "rope_theta": 1e4}))
    with pytest.raises(ConfigError, match=r"differs from .*\n  model\.rope_theta: 10000\.0, not 50000\.0\n.*--allow"):
        train(other)
    assert not (folder / "other").exists()
    assert train(other, allow=["model.rope_theta"]).step == 1


def test_a_tokenizer_of_another_vocabulary_is_named(folder, source):
    def config(tokenizer):
        return parse(RunConfig, mapping(folder, "own", "b", {"tokenizer": tokenizer}, run={"init_from": source}))

    with pytest.raises(ConfigError, match=r"\n  data\.tokenizer: 'bpe', not '.*source/tokenizer'\n.*--allow data\.tok"):
        train(config("bpe"))
    check(resolve(config("bpe")), ("data.tokenizer",))
    shutil.copytree(f"{source}/tokenizer", folder / "copied")
    check(resolve(config(str(folder / "copied"))))
    vocabulary = folder / "copied" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("<|end_of_text|>", "<|end|>"))
    (folder / "copied" / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    with pytest.raises(ConfigError, match=r"data\.tokenizer: '.*copied'"):
        check(resolve(config(str(folder / "copied"))))


@pytest.fixture(scope="module")
def finished(folder):
    """A finished run, to copy."""
    train(parse(RunConfig, mapping(folder, "finished")))
    return folder / "finished"


def test_a_resumed_run_may_change_what_is_allowed_and_notes_it(folder, finished):
    shutil.copytree(finished, folder / "changed")
    changes = {"data": {"batch_size": 8}, "optimizer": {"learning_rate": 1e-4, "schedule": {"decay": "constant"}}}
    changed = parse(RunConfig, mapping(folder, "changed", "b", run={"steps": 6}, **changes))
    choices = folder / "changed" / "ops.json"
    before = [
        {**entry, "implementation": f"other {entry['implementation']}"} for entry in json.loads(choices.read_text())
    ]
    choices.write_text(json.dumps([entry for entry in before if entry["op"] == "norm"]))
    keys = ["data.source", "data.batch_size", "optimizer.learning_rate", "optimizer.schedule.decay"]
    with pytest.raises(ConfigError, match=r".*\n  ".join(map(re.escape, keys)) + r".*\n.*--allow data\.source"):
        train(changed, resume=True)
    # Other documents, and the ids that the model has learned.
    for typo, message in (("o", "no such key"), ("optimizer.learning_rat", "Did you mean 'optimizer.learning_rate'")):
        with pytest.raises(ConfigError, match=f"--allow {typo}: .*{message}"):
            train(changed, resume=True, allow=[*keys[:2], typo])
    encoded_by = build(changed, resume=True, allow=keys).data.tokenizer.vocabulary
    assert encoded_by == (folder / "changed" / "tokenizer" / "tokenizer.json").read_bytes()
    assert train(changed, resume=True, allow=keys).step == 6
    (note,) = map(json.loads, (folder / "changed" / "changes.jsonl").read_text().splitlines())
    of_ops = [line for line in note["changes"] if line.startswith("ops.")]
    of_config = [line.partition(":")[0] for line in note["changes"] if line not in of_ops]
    assert of_config == keys
    assert of_ops and all(re.fullmatch(r"ops\.norm .*: (.+), was other \1", line) for line in of_ops)
    assert {entry["op"] for entry in json.loads(choices.read_text())} >= {"attention", "norm"}
    assert load_yaml(folder / "changed" / "config.yaml")["optimizer"]["learning_rate"] == 1e-4
    # Killed before a checkpoint: the newest one is from before the change, whose position in the data does not fit.
    shutil.rmtree(folder / "changed" / "checkpoints" / "00000006")
    assert train(changed, resume=True).step == 6


def test_torn_files_of_a_killed_run_are_named_and_written_anew(folder, finished):
    shutil.copytree(finished, folder / "torn")
    whole = {name: (folder / "torn" / name).read_text() for name in ("ops.json", "files.json")}
    for name, text in whole.items():
        (folder / "torn" / name).write_text(text[: len(text) // 2])
    with pytest.warns(UserWarning, match="cannot be read, so changes since then are not reported") as warned:
        assert train(parse(RunConfig, mapping(folder, "torn", run={"steps": 5})), resume=True).step == 5
    assert all(any(f"{name} cannot be read" in str(each.message) for each in warned) for name in whole)
    written = {name: json.loads((folder / "torn" / name).read_text()) for name in whole}
    assert written["files.json"] == json.loads(whole["files.json"])
    # Calls of the tests before this one, in the same process, are listed too.
    assert all(entry in written["ops.json"] for entry in json.loads(whole["ops.json"]))
    assert not list((folder / "torn").glob("*.partial"))


def test_a_key_is_allowed_only_where_there_is_something_to_differ_from(folder):
    with pytest.raises(ConfigError, match=r"--allow data\.source has no effect.*or run\.init_from"):
        build(parse(RunConfig, mapping(folder, "alone")), allow=["data.source"])


def test_files_that_were_added_are_named_and_noted(folder):
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("one two three four five six seven eight nine ten " * 40)
    config = mapping(folder, "grown", "corpus/*")
    train(parse(RunConfig, config))
    added = folder / "corpus" / "b.txt"
    added.write_text("eleven twelve " * 40)
    longer = parse(RunConfig, config | {"run": {"steps": 6}})
    line = f"data.source: {added} was added"
    with pytest.raises(ConfigError, match=rf"\n  {re.escape(line)}\n.*--allow data\.source"):
        train(longer, resume=True)
    assert train(longer, resume=True, allow=["data.source"]).step == 6
    (note,) = map(json.loads, (folder / "grown" / "changes.jsonl").read_text().splitlines())
    assert note["changes"] == [line]
    build(parse(RunConfig, config | {"run": {"steps": 7}}), resume=True)  # they are the run's by now


def test_the_smallest_config_is_a_run(folder):
    config = parse(RunConfig, {"output": "runs/smallest", "model": {"name": "llama"}})
    config.data.check(config.model)
    few = dataclasses.replace(config.data, source=f"text:{folder}/a.txt", validation_fraction=0.0)
    tokenizer = few.build(seed=0, model=config.model, cache_dir=folder / "cache").tokenizer
    assert tokenizer.vocab_size < config.model.vocab_size == 32000  # for which the documents have too few words


@pytest.mark.slow
def test_the_smallest_config_trains(tmp_path):
    """Only its thousand steps are fewer here."""
    config = {"output": str(tmp_path / "smallest"), "model": {"name": "llama"}, "run": {"steps": 1}}
    assert train(parse(RunConfig, config)).step == 1


WRITTEN = "output: run\nmodel:\n  name: llama\n  layers: 1\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (WRITTEN.replace("name: llama", "name: 'lla"), "is not valid YAML"),
        ("output: run\n", "has no key 'model'"),
        ("", "has no key 'model'"),
        ("output", "holds a str"),
    ],
)
def test_the_truncated_config_of_a_run_is_called_damaged(tmp_path, text, problem):
    (tmp_path / "config.yaml").write_text(text)
    for remedy in ("Restore the file", f"Replace the file by the copy {tmp_path}/checkpoints/00000007/config.yaml"):
        with pytest.raises(
            RunDirectoryError, match=rf"(?s)The run {tmp_path} is damaged: .*{problem}.*{remedy}"
        ) as caught:
            run_config(tmp_path)
        assert str(tmp_path / "config.yaml") in str(caught.value)
        for step in (3, 7):
            (tmp_path / "checkpoints" / f"{step:08d}").mkdir(parents=True, exist_ok=True)
            (tmp_path / "checkpoints" / f"{step:08d}" / "config.yaml").write_text(WRITTEN)


def test_a_value_in_the_config_of_a_run_is_reported_with_its_file(tmp_path):
    (tmp_path / "config.yaml").write_text(WRITTEN.replace("layers: 1", "layers: 1."))
    with pytest.raises(ConfigError, match=rf"{tmp_path}/config.yaml, the config .*model.layers.*\nThe run is damaged"):
        run_config(tmp_path)
