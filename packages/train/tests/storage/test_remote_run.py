"""Runs in object storage: complete or absent, whatever ends them; a storage that refuses is found at the start."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stack_core.abi.config import parse
from stack_core.abi.errors import CheckpointError, ConfigError, RunDirectoryError
from stack_train.run import train as run
from stack_train.run.config import RunConfig
from stack_train.storage.bucket import Bucket
from stack_train.storage.remote_run import RemoteRun, local_copy, run_path

MODEL = {"name": "llama", "vocab_size": 264, "layers": 1, "embed": 8, "heads": 1, "mlp": 8, "dtype": "float32"}


def write_checkpoint(remote: RemoteRun, step: int, content: str = "x") -> None:
    folder = remote.path / "checkpoints" / f"{step:08d}"
    (folder / "arrays" / "0").mkdir(parents=True)
    (folder / "arrays" / "0" / "data").write_text(content)
    (folder / "manifest.json").write_text(f"manifest of {step} {content}")
    remote.checkpoint_saved(step)


def start(bucket: str, *, resume: bool = False, keep: int = 2) -> RemoteRun:
    remote = RemoteRun(f"{bucket}/runs/a", keep=keep)
    remote.prepare(resume=resume)
    if not resume:
        remote.path.mkdir(parents=True)
        (remote.path / "run.lock").touch()
        (remote.path / "config.yaml").write_text("config")
    return remote


def test_checkpoints_and_files_are_uploaded_and_old_ones_deleted(bucket: str) -> None:
    with start(bucket) as remote:
        remote.upload_files()
        for step in (1, 2, 3):
            write_checkpoint(remote, step)
            shutil.rmtree(remote.path / "checkpoints" / f"{step:08d}")  # as the run may at any time
        (remote.path / "metrics.jsonl").write_text("1")
        (remote.path / "metrics.jsonl.partial").write_text("1")
    checkpoints = [
        f"checkpoints/0000000{step}/{name}" for step in (2, 3) for name in ("arrays/0/data", "manifest.json")
    ]
    assert Bucket(remote.address).names() == [*checkpoints, "config.yaml", "metrics.jsonl"]
    assert not list(remote.path.glob(".upload-*"))


def test_resuming_makes_the_local_copy_anew_from_the_newest_complete_checkpoint(bucket: str, cache: Path) -> None:
    with start(bucket) as remote:
        for step in (1, 2, 3):
            write_checkpoint(remote, step)
    Bucket(remote.address).delete(["checkpoints/00000003/manifest.json"])  # as a killed upload leaves it
    shutil.rmtree(remote.path / "checkpoints" / "00000003")  # else it is uploaded again
    (remote.path / "stale").touch()
    for _ in range(2):
        with start(bucket, resume=True) as again:
            found = sorted(str(path.relative_to(again.path)) for path in again.path.rglob("*") if path.is_file())
            assert found == [
                "checkpoints/00000002/arrays/0/data",
                "checkpoints/00000002/manifest.json",
                "config.yaml",
                "run.lock",
            ]
        shutil.rmtree(cache)
    copy = local_copy(remote.address)
    assert (copy / "checkpoints" / "00000002" / "arrays" / "0" / "data").read_text() == "x"
    # The copy is used again while its checkpoint is the newest.
    Bucket(remote.address).delete(["checkpoints/00000002/arrays/0/data"])
    assert (local_copy(remote.address) / "checkpoints" / "00000002" / "arrays" / "0" / "data").read_text() == "x"


def test_resuming_uploads_a_newer_local_checkpoint_of_the_same_course(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = start(bucket)
    write_checkpoint(remote, 1)
    remote.wait()
    with monkeypatch.context() as patched, pytest.raises(CheckpointError):
        patched.setattr(Bucket, "upload", lambda self, files: Bucket.read(self, "none"))
        write_checkpoint(remote, 2)
        remote.wait()
    with start(bucket, resume=True) as again:
        assert (again.path / "checkpoints" / "00000002" / "manifest.json").is_file()
    # Another machine took another course since: its checkpoint is the run's.
    write_checkpoint(again := start(bucket, resume=True), 3)
    again.wait()
    other = again.path / "checkpoints" / "00000003"
    (other / "manifest.json").write_text("another")
    shutil.copytree(other, other.with_name("00000004"))
    shutil.rmtree(other.with_name("00000002"))
    with start(bucket, resume=True) as last:
        names = [path.name for path in (last.path / "checkpoints").iterdir()]
        assert names == ["00000003"] and "another" not in (last.path / "checkpoints/00000003/manifest.json").read_text()


@pytest.mark.parametrize(("config", "kept"), [("config", ["00000001"]), ("another run", [])])
def test_a_local_checkpoint_is_the_first_of_the_storage_only_with_its_config(
    bucket: str, config: str, kept: list[str]
) -> None:
    remote = start(bucket)
    write_checkpoint(remote, 1)
    remote.wait()
    storage = Bucket(remote.address)
    storage.delete(storage.names("checkpoints"))
    (remote.path / "other.yaml").write_text(config)
    storage.upload({"config.yaml": remote.path / "other.yaml"})
    with start(bucket, resume=True) as again:
        assert [path.name for path in again.path.glob("checkpoints/*")] == kept


def test_checkpoints_of_an_abandoned_course_are_set_aside(bucket: str) -> None:
    with start(bucket, keep=9) as remote:
        for step in (1, 3):
            write_checkpoint(remote, step)
    with start(bucket, resume=True, keep=9) as again:
        shutil.rmtree(again.path / "checkpoints" / "00000003")
        write_checkpoint(again, 2, "other")
        with pytest.warns(UserWarning, match=r"Checkpoint 3 in s3://bucket/runs/a was set aside"):
            again.wait()
    names = Bucket(remote.address).names("checkpoints")
    assert "checkpoints/00000003/manifest.set-aside.json" in names
    assert "checkpoints/00000003/manifest.json" not in names
    assert "checkpoints/00000002/manifest.json" in names


def test_a_run_is_neither_overwritten_nor_invented(bucket: str) -> None:
    with pytest.raises(RunDirectoryError, match=r"holds no run: it has no config.yaml"):
        start(bucket, resume=True)
    with pytest.raises(RunDirectoryError, match=r"holds no run"):
        local_copy(f"{bucket}/runs/a")
    with start(bucket):
        pass
    with pytest.raises(CheckpointError, match=r"has no complete checkpoint to start from"):
        local_copy(f"{bucket}/runs/a")
    with pytest.raises(RunDirectoryError, match=r"s3://bucket/runs/a holds another run. Continue it with --resume"):
        start(bucket)


def test_a_failed_run_leaves_its_place_to_another(bucket: str) -> None:
    with pytest.raises(ZeroDivisionError), start(bucket) as remote:
        remote.upload_files()
        (remote.path / "config.yaml").rename(remote.path / "failed.yaml")
        raise ZeroDivisionError
    assert Bucket(remote.address).names() == ["failed.yaml"]
    start(bucket)


def test_a_bucket_that_refuses_writes_is_found_at_the_start(bucket: str, cache: Path, tmp_path: Path) -> None:
    mapping = {"model": MODEL, "output": "s3://read-only/run", "data": {"source": f"text:{tmp_path}/none"}}
    # Before the data is read, which is missing.
    with pytest.raises(
        RunDirectoryError, match=r"'s3://read-only/run' cannot be written: .*credentials in the environment"
    ):
        run.train(parse(RunConfig, mapping))
    assert not cache.exists()


def test_an_upload_that_fails_ends_the_run(directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = start(directory)
    write_checkpoint(remote, 1)
    remote.wait()
    monkeypatch.setattr(Bucket, "upload", lambda self, files: Bucket.read(self, "none"))
    write_checkpoint(remote, 2)
    with pytest.raises(CheckpointError, match=r"could not be uploaded. 's3://bucket/runs/a' cannot be read \(none\)"):
        write_checkpoint(remote, 3)
    warned = pytest.warns(UserWarning, match=r"The last files of the run were not uploaded")
    with warned, pytest.raises(ZeroDivisionError), remote:
        raise ZeroDivisionError


def test_addresses_and_settings_that_do_not_fit(tmp_path: Path) -> None:
    for output in ("s3://bucket", "s3:///run", "gs://bucket/a/../b"):
        with pytest.raises(ConfigError, match=r"is not a folder in object storage; expected 's3://BUCKET/FOLDER'"):
            parse(RunConfig, {"model": MODEL, "output": output})
    for output in ("hdfs://host/run", "ftp://host/run"):
        with pytest.raises(ConfigError, match=output.partition(":")[0]):
            parse(RunConfig, {"model": MODEL, "output": output})
    config = parse(RunConfig, {"model": MODEL, "output": "gs://bucket/run/", "cluster": {"hosts": 2}})
    assert config.output == "gs://bucket/run" and run_path(config.output).name != "run"
    from stack_train.run.cluster import train_on_cluster

    with pytest.raises(ConfigError, match=r"runs on several hosts need a directory that all of them share"):
        train_on_cluster(config)


def test_a_missing_package_is_answered_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(scheme: str, **options: object) -> None:
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr("fsspec.filesystem", missing)
    with pytest.raises(RunDirectoryError, match=r"Install it: .*train\S*\[gcs\]"):
        Bucket("gs://bucket/run")


@pytest.fixture
def config_of(tmp_path: Path) -> Callable[..., RunConfig]:
    (tmp_path / "rhyme.txt").write_text("one two buckle my shoe, three four knock at the door. " * 50)
    base = {
        "model": MODEL,
        "data": {"source": f"text:{tmp_path}/rhyme.txt", "seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0},
        "checkpoint": {"every_steps": 2},
        # The rate does not depend on the number of steps.
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "schedule": {"decay": "constant"}},
    }
    return lambda output, steps, **settings: parse(
        RunConfig, {**base, "output": output, "run": {"steps": steps, **settings}}
    )


def test_a_run_resumes_on_another_machine_bitwise_and_starts_another(
    bucket: str, cache: Path, tmp_path: Path, config_of: Callable[..., RunConfig]
) -> None:
    def leaves(path: Path) -> dict[str, str]:
        manifest = json.loads((path / "checkpoints" / "00000004" / "manifest.json").read_text())
        return {name: each["digest"] for name, each in manifest["content"]["leaves"].items()}

    run.train(config_of(str(tmp_path / "local"), 4))
    address = f"{bucket}/runs/mine"
    run.train(config_of(address, 3))
    shutil.rmtree(cache)
    summary = run.train(config_of(address, 4), resume=True)
    assert leaves(summary.directory) == leaves(tmp_path / "local")
    assert {"config.yaml", "metrics.jsonl", "report.html", "goodput.jsonl", "tokenizer/tokenizer.json"} <= set(
        Bucket(address).names()
    )
    started = run.train(config_of(str(tmp_path / "started"), 1, init_from=address))
    assert started.loss is not None and np.isfinite(started.loss)
    assert (tmp_path / "started" / "config.yaml").read_text().count(address) == 1


def test_a_run_that_ended_before_its_first_checkpoint_resumes_from_its_start(
    directory: str, cache: Path, config_of: Callable[..., RunConfig]
) -> None:
    address = f"{directory}/runs/mine"
    run.train(config_of(address, 2))
    Bucket(address).delete(Bucket(address).names("checkpoints"))
    shutil.rmtree(cache)
    assert run.train(config_of(address, 2), resume=True).step == 2


def test_partial_uploads_are_deleted_and_checkpoints_lose_their_manifest_first(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(bucket, keep=1) as remote:
        write_checkpoint(remote, 1)
        remote.wait()
        storage = Bucket(remote.address)
        storage.delete(["checkpoints/00000001/manifest.json"])  # as a killed upload leaves it
        write_checkpoint(remote, 2)
        remote.wait()
        assert storage.names("checkpoints") == [
            f"checkpoints/00000002/{name}" for name in ("arrays/0/data", "manifest.json")
        ]
        deleted: list[str] = []
        delete = Bucket.delete
        monkeypatch.setattr(Bucket, "delete", lambda self, names: (deleted.extend(names), delete(self, names))[1])
        shutil.rmtree(remote.path / "checkpoints" / "00000002")
        write_checkpoint(remote, 2, "other")
        remote.wait()
    assert deleted == [f"checkpoints/00000002/{name}" for name in ("manifest.json", "arrays/0/data")]


def test_a_copy_in_use_is_not_replaced(directory: str) -> None:
    with start(directory) as remote:
        write_checkpoint(remote, 1)
    copy = local_copy(remote.address)
    inode = copy.stat().st_ino
    assert local_copy(remote.address) == copy and copy.stat().st_ino == inode
