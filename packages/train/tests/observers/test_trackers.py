"""Experiment trackers, with the real packages; `nox -s trackers` installs them."""

import importlib.util
import json
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError, Interrupted
from stack_core.abi.event_bus import EventBus, ObserverContext
from stack_core.abi.events import EvaluationFinished, RunFailed, RunFinished, RunStarted, StepFinished
from stack_train.observers.mlflow import MlflowConfig, mlflow_tracker
from stack_train.observers.wandb import WandbConfig, wandb_tracker

EXPECTED = {
    "train/loss": [(1, 3.0), (2, 2.5), (2, 2.5), (3, 2.0)],
    "train/tokens_per_s": [(1, 128.0), (2, 128.0), (2, 128.0), (3, 128.0)],
    "validation/loss": [(3, 1.5)],
}


@config
class Sections:
    sections: dict
    layers: int = 7


def context_of(directory: Path, **sections) -> ObserverContext:
    return ObserverContext(directory, Sections(sections=sections), terminal=False)


def sessions(build, context) -> None:
    """Reports a session that Ctrl-C stops after step 2, and one that repeats step 2 and ends after step 3."""
    for first, losses, end in (
        (0, {1: 3.0, 2: 2.5}, RunFailed(Interrupted("stopped"))),
        (1, {2: 2.5, 3: 2.0}, RunFinished(3, {})),
    ):
        time.sleep(1.1)  # W&B names a session's directory by the second
        with EventBus([build(context)]) as bus:
            bus.emit(
                RunStarted(
                    first_step=first,
                    steps=3,
                    parameters=10,
                    work=("tokens", 64),
                    flops_per_step=10**9,
                    ideal_step_s=None,
                    compile_s=1.0,
                    directory=context.directory,
                )
            )
            for step, loss in losses.items():
                bus.emit(StepFinished(step, {"loss": loss}, 0.5, 128.0, None))
            if isinstance(end, RunFinished):
                bus.emit(EvaluationFinished(3, {"loss": 1.5}, 0.1))
            bus.emit(end)
            assert bus.observers, "the tracker failed and was dropped"


def test_wandb_holds_the_scalars_of_all_sessions_in_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs stack-train[wandb]")
    sessions(wandb_tracker, context_of(tmp_path, wandb=WandbConfig(project="tests", tags=("tiny",), mode="offline")))
    found: dict[str, list] = {name: [] for name in EXPECTED}
    runs = []
    for file in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb")):
        for record in records_of(file):
            if record.HasField("run"):
                values = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                runs.append((record.run.run_id, record.run.project, list(record.run.tags), values["layers"]))
            values = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
            for name, seen in found.items():
                if name in values:
                    seen.append((values["step"], values[name]))
    identity = (tmp_path / "wandb_run_id").read_text()
    assert runs == [(identity, "tests", ["tiny"], 7)] * 2
    assert found == EXPECTED


def records_of(file: Path) -> list:
    """Reads the records of a LevelDB log: blocks of 32 KiB with chunks of (checksum, length, kind, data)."""
    from wandb.proto import wandb_internal_pb2

    content, position, records, partial = file.read_bytes(), 7, [], b""
    while position + 7 <= len(content):
        if (rest := 2**15 - position % 2**15) < 7:
            position += rest
            continue
        length, kind = struct.unpack_from("<HB", content, position + 4)
        partial += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(partial))
            partial = b""
    return records


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of SQLAlchemy
def test_mlflow_holds_the_scalars_of_all_sessions_in_one_run(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("mlflow", reason="needs stack-train[mlflow]")
    pytest.importorskip("sqlalchemy", reason="a database as tracking server needs the whole package mlflow")
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    sessions(mlflow_tracker, context_of(tmp_path, mlflow=MlflowConfig(experiment="tests", tags={"size": "tiny"})))
    client = MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert run.info.run_id == (tmp_path / "mlflow_run_id").read_text()
    assert (run.info.run_name, run.info.status) == (tmp_path.name, "FINISHED")
    assert run.data.params["layers"] == "7" and run.data.tags["size"] == "tiny"
    for name, expected in EXPECTED.items():
        # MLflow keeps one value where step, time and value are equal.
        assert sorted({(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)}) == sorted(
            set(expected)
        )


def test_a_server_out_of_reach_costs_the_tracker_and_not_the_run(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("mlflow", reason="needs stack-train[mlflow]")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    tracker = mlflow_tracker(context_of(tmp_path, mlflow=MlflowConfig(tracking_uri="http://127.0.0.1:9")))
    with EventBus([tracker]) as bus, pytest.warns(UserWarning, match="MlflowTracker failed and is left out"):
        bus.emit(
            RunStarted(
                first_step=0,
                steps=1,
                parameters=1,
                work=("tokens", 1),
                flops_per_step=1,
                ideal_step_s=None,
                compile_s=0.0,
                directory=tmp_path,
            )
        )


@pytest.mark.parametrize(("name", "build"), [("wandb", wandb_tracker), ("mlflow", mlflow_tracker)])
def test_a_missing_package_is_named_with_its_extra(name, build, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    section = SimpleNamespace(tracking_uri="http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=rf"'{name}'.*pip install 'stack-train\[{name}\]'"):
        build(context_of(tmp_path, **{name: section}))
    assert build(context_of(tmp_path)) is None


def test_mlflow_needs_a_server(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        mlflow_tracker(context_of(tmp_path, mlflow=MlflowConfig()))
