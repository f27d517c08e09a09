"""Prepared sets: the batches of the documents, also after kills; and files that are missing or damaged."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from stack_core import cli
from stack_core.abi.config import parse
from stack_core.abi.errors import ConfigError, DataError
from stack_train.data.kinds.text import TextData
from stack_train.data.pipeline import Pipeline
from stack_train.data.prepared.manifest import Manifest, open_corpus
from stack_train.data.prepared.prepare import prepare
from stack_train.data.prepared.tokens import ShardedTokens
from stack_train.data.settings import TextSettings
from stack_train.data.source import open_source

MODEL = SimpleNamespace(vocab_size=400, max_positions=256)
Build = Callable[..., Pipeline]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Five files of twelve documents, some of them empty."""
    (tmp_path / "texts").mkdir()
    for file in range(5):
        lines = (json.dumps({"text": f"fox {file} of {number} " * (number % 4)}) for number in range(12))
        (tmp_path / "texts" / f"{file}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return tmp_path / "texts"


@pytest.fixture
def raw(documents: Path, pipeline: Build) -> Pipeline:
    """The pipeline that tokenizes the documents itself."""
    return pipeline(source=f"jsonl:{documents}/*.jsonl", vocab_size=262, batch_size=4)


@pytest.fixture
def prepared(
    documents: Path, raw: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Manifest]:
    monkeypatch.setattr("stack_train.data.file_source._PART_BYTES", 1)

    def make(directory: Path = tmp_path / "set", workers: int = 1, shard_tokens: int = 100) -> Manifest:
        config = TextSettings(source=f"jsonl:{documents}/*.jsonl")
        return prepare(config, raw.tokenizer, directory, workers=workers, shard_tokens=shard_tokens)

    return make


def files(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "prepare.lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_a_prepared_set_gives_the_batches_of_its_documents(
    packing: str, documents: Path, pipeline: Build, prepared: Callable[..., Manifest], tmp_path: Path
) -> None:
    manifest = prepared()
    assert len(manifest.shards) > 5 and manifest.documents == 5 * 9
    config = TextData(
        source=f"prepared:{tmp_path}/set", packing=packing, seq_tokens=32, batch_size=4, validation_fraction=0.2
    )
    config.check(MODEL)
    assert config.is_ready and not TextData().is_ready
    ours = config.build(seed=0, model=MODEL)
    theirs = TextData(
        source=f"jsonl:{documents}/*.jsonl",
        tokenizer=f"{tmp_path}/set/tokenizer",
        packing=packing,
        seq_tokens=32,
        batch_size=4,
        validation_fraction=0.2,
    ).build(seed=0, model=MODEL, cache_dir=tmp_path / "cache")
    for one, other in (
        (islice(ours.train_iterator(), 60), islice(theirs.train_iterator(), 60)),
        (ours.validation_batches(), theirs.validation_batches()),
    ):
        for left, right in zip(one, other, strict=True):
            assert all(np.array_equal(left[name], right[name]) for name in left | right)
            assert ours.describe_rows(left["row_ids"]) == theirs.describe_rows(right["row_ids"])
    texts = [document.text for document in open_source(config).documents()]
    read = [document.text for document in open_source(TextData(source=f"jsonl:{documents}/*.jsonl")).documents()]
    assert texts == [text for text in read if text]


def test_tokens_of_several_shards_are_one_array() -> None:
    whole = np.arange(100, dtype=np.uint16)
    sharded = ShardedTokens([whole[:7], whole[7:60], whole[60:]])
    assert len(sharded) == 100
    rng = np.random.default_rng(0)
    for index in (rng.integers(0, 100, (4, 9)), slice(5, 62), slice(0, 0), np.asarray([6, 7, 59, 60, 99])):
        np.testing.assert_array_equal(sharded[index], whole[index])
        assert sharded[index].dtype == np.uint16


def test_workers_write_the_same_files(prepared: Callable[..., Manifest], tmp_path: Path) -> None:
    prepared(tmp_path / "one")
    prepared(tmp_path / "two", workers=2)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_a_killed_command_continues_after_its_last_shard(raw: Pipeline, tmp_path: Path) -> None:
    raw.tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "many.jsonl").write_text("".join(json.dumps({"text": f"fox {n} " * 20}) + "\n" for n in range(1500)))
    command = ["data", "prepare", f"jsonl:{tmp_path}/many.jsonl", "--tokenizer", str(tmp_path / "tokenizer")]
    command += ["--shard-tokens", "1000"]
    process = subprocess.Popen([sys.executable, "-m", "stack_core", *command, "--output", str(tmp_path / "cut")])
    shards = tmp_path / "cut" / "shards"
    while process.poll() is None and len(list(shards.glob("*.npz"))) < 5:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(DataError, match=r"is incomplete. Run the command that began it again"):
        open_source(TextData(source=f"prepared:{tmp_path}/cut"))
    complete = sorted(path.with_suffix(".tokens") for path in shards.glob("*.npz"))
    before = {path: path.stat().st_mtime_ns for path in complete}
    command += ["--workers", "1"]
    cli.main([*command, "--output", str(tmp_path / "cut")])
    assert {path: path.stat().st_mtime_ns for path in complete} == before
    cli.main([*command, "--output", str(tmp_path / "whole")])
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """A killed command leaves no worker that would go on to write."""
    program = """
import os, signal, time
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
from stack_train.data.prepared.prepare import _start_worker
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(1, context, _start_worker, (context.Event(),))
    print(executor.submit(os.getpid).result(), flush=True)
    executor.submit(time.sleep, 60)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "program.py").write_text(program)
    process = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, check=False
    )
    worker = int(process.stdout)
    for _ in range(500):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.01)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its parent")


def test_a_directory_of_other_files_is_left_alone(prepared: Callable[..., Manifest], tmp_path: Path) -> None:
    (tmp_path / "run" / "tokenizer").mkdir(parents=True)  # of another run, which the workers would take
    with pytest.raises(DataError, match=r"run' holds other files \(tokenizer\). Choose a new or an empty --output"):
        prepared(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer"]


def test_a_set_of_something_else_is_left_alone(
    prepared: Callable[..., Manifest], documents: Path, tmp_path: Path
) -> None:
    first = prepared()
    before = files(tmp_path / "set")
    assert prepared() == first
    with pytest.raises(DataError, match=r"(?s)prepared from something else.*shard_tokens: 400, not 100"):
        prepared(shard_tokens=400)
    (documents / "0.jsonl").write_text('{"text": "other"}')
    with pytest.raises(DataError, match=r"(?s)prepared from something else.*documents"):
        prepared()
    assert files(tmp_path / "set") == before


def test_a_file_that_is_missing_or_cut_short_is_named(prepared: Callable[..., Manifest], tmp_path: Path) -> None:
    manifest = prepared()
    shard = tmp_path / "set" / manifest.shards[1].file
    contents = shard.read_bytes()
    shard.write_bytes(contents[:-2])
    with pytest.raises(
        DataError, match=rf"{shard.name}' of a prepared set is damaged: it has {len(contents) - 2} bytes"
    ):
        open_corpus(tmp_path / "set")
    shard.unlink()
    with pytest.raises(DataError, match=rf"{shard.name}' of a prepared set is damaged: it is missing"):
        open_corpus(tmp_path / "set")
    shard.write_bytes(contents[:-2] + b"\x01\x01")
    open_corpus(tmp_path / "set")
    with pytest.raises(SystemExit, match=r"2"):
        cli.main(["data", "verify", str(tmp_path / "set")])
    shard.write_bytes(contents)
    cli.main(["data", "verify", str(tmp_path / "set")])
    (tmp_path / "set" / "offsets.npy").write_bytes(b"")
    with pytest.raises(DataError, match=r"The index of the prepared set"):
        open_corpus(tmp_path / "set")
    with pytest.raises(DataError, match=r"holds no prepared set. Give the --output"):
        open_source(TextData(source=f"prepared:{tmp_path}"))


def test_verify_names_the_damaged_file(
    prepared: Callable[..., Manifest], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = prepared()
    cli.main(["data", "verify", str(tmp_path / "set")])
    assert f"{len(manifest.shards) + 4} files are intact" in capsys.readouterr().out
    shard = tmp_path / "set" / manifest.shards[0].file
    shard.write_bytes(bytes(len(shard.read_bytes())))
    with pytest.raises(SystemExit, match=r"2"):
        cli.main(["data", "verify", str(tmp_path / "set")])
    assert f"differ from their digests: {manifest.shards[0].file}." in capsys.readouterr().err


def test_another_tokenizer_is_refused(prepared: Callable[..., Manifest], pipeline: Build, tmp_path: Path) -> None:
    prepared()
    other = pipeline(vocab_size=270)
    other.tokenizer.save(tmp_path / "other")
    source = {"source": f"prepared:{tmp_path}/set", "seq_tokens": 32}
    with pytest.raises(DataError, match=r"was tokenized with another tokenizer than this run's. Set data.tokenizer to"):
        TextData(**source, tokenizer=str(tmp_path / "other")).build(seed=0, model=MODEL)
    with pytest.raises(ConfigError, match=r"data.tokenizer is 'bpe', but .* was tokenized before"):
        TextData(**source, tokenizer="bpe").build(seed=0, model=MODEL)
    with pytest.raises(ConfigError, match=r"data.tokenizer_bytes would have no effect: the documents are tokenized"):
        TextData(**source, tokenizer_bytes=9).check(MODEL)


def test_a_run_and_its_mixture_are_prepared(documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mix = {name: {"source": f"jsonl:{documents}/{glob}.jsonl"} for name, glob in (("low", "[01]"), ("high", "[2-4]"))}
    model = {"name": "llama", "vocab_size": 264, "layers": 1, "embed": 8, "heads": 1, "mlp": 8, "max_positions": 64}
    config = {"output": str(tmp_path / "run"), "model": model, "data": {"mix": mix, "seq_tokens": 32}}
    (tmp_path / "run.yaml").write_text(json.dumps(config))
    command = ["data", "prepare", str(tmp_path / "run.yaml"), "--workers", "1", "--output"]
    cli.main([*command, str(tmp_path / "sets"), "--data.seq_tokens", "16"])
    sets = {name: {"source": f"prepared:{tmp_path}/sets/{name}", "weight": 1.0} for name in mix}
    ours, theirs = (
        parse(TextData, {"mix": each, "seq_tokens": 16}).build(seed=3, model=SimpleNamespace(**model))
        for each in (sets, mix)
    )
    for left, right in zip(islice(ours.train_iterator(), 9), islice(theirs.train_iterator(), 9), strict=True):
        assert all(np.array_equal(left[name], right[name]) for name in left | right)
    for arguments, message in (
        (["jsonl:x"], "so a tokenizer is required"),
        (["jsonl:x", "--data.seq_tokens", "3"], "is an address of documents"),
        ([str(tmp_path / "run.yaml"), "--text-field", "body"], "a run has --data.text_field"),
        ([str(tmp_path / "run.yaml"), "--workers", "0"], "must be at least 1"),
    ):
        with pytest.raises(SystemExit, match=r"2"):
            cli.main(["data", "prepare", *arguments, "--output", str(tmp_path / "none")])
        assert not (tmp_path / "none").exists(), message
