"""What observers write for people and for programs."""

import dataclasses
import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console

from stack_core.abi.errors import Interrupted
from stack_core.abi.event_bus import EventBus, ObserverContext
from stack_core.abi.events import (
    CheckpointSaved,
    EvaluationFinished,
    RunFailed,
    RunFinished,
    RunStarted,
    StepFinished,
    StepStarted,
)
from stack_core.abi.plugins import registries
from stack_train.observers.goodput import GoodputObserver
from stack_train.observers.history import HistoryObserver
from stack_train.observers.jsonl import JsonlObserver
from stack_train.observers.report import ReportObserver
from stack_train.observers.tensorboard import TensorBoardObserver
from stack_train.observers.terminal import TerminalObserver, describe

WRITERS = ("history", "jsonl", "report")


def started(directory, first_step=0):
    return RunStarted(
        first_step=first_step,
        steps=10,
        parameters=1234,
        work=("tokens", 64),
        flops_per_step=10**9,
        ideal_step_s=None,
        compile_s=1.0,
        directory=directory,
    )


def finished(step, loss=2.5, mfu=None):
    return StepFinished(step, {"loss": loss, "grad_norm": 1.0}, 0.5, 128.0, mfu)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_goodput_moves_what_went_on_inside_training(tmp_path, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    observer = GoodputObserver(tmp_path / "goodput.jsonl")
    observer.observe(dataclasses.replace(started(tmp_path), setup_s=7.0))
    for event, at_s in (
        (dataclasses.replace(finished(1), data_wait_s=2.0), 110.0),
        (CheckpointSaved(1, tmp_path, 3.0), 114.0),
        (EvaluationFinished(1, {"loss": 2.0}, 1.5), 116.0),
        (RunFailed(Interrupted("stopped")), 117.0),
    ):
        now_s = at_s
        observer.observe(event)
    observer.close()
    now_s = 117.5
    observer.finish()
    (record,) = lines_of(tmp_path / "goodput.jsonl")
    assert record["seconds"] == {
        "starting": 6.0,
        "compiling": 1.0,
        "training": 10.5,
        "waiting for data": 2.0,
        "evaluating": 1.5,
        "saving": 3.0,
        "finishing": 0.5,
    }


def test_jsonl_holds_one_object_a_step_and_an_evaluation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    observer = JsonlObserver(path)
    for event in (started(tmp_path), finished(1), finished(2, mfu=0.5), EvaluationFinished(2, {"loss": 2.0}, 0.1)):
        observer.observe(event)
    observer.close()
    records = lines_of(path)
    assert [(record["kind"], record["step"]) for record in records] == [("train", 1), ("train", 2), ("evaluation", 2)]
    assert records[0]["mfu"] is None and records[1]["mfu"] == 0.5
    assert records[0]["loss"] == 2.5 and records[0]["tokens_per_s"] == 128.0


def test_a_resumed_run_drops_the_lines_of_steps_it_does_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "kind": "train"}\n{"step": 2, "kind": "train"}\n{"step": 3, "ki')
    observer = JsonlObserver(path)
    observer.observe(started(tmp_path, first_step=1))
    observer.observe(finished(2))
    observer.close()
    assert [record["step"] for record in lines_of(path)] == [1, 2]


def test_tensorboard_files_hold_the_scalars(tmp_path):
    observer = TensorBoardObserver(tmp_path / "tensorboard")
    observer.observe(started(tmp_path))
    observer.observe(finished(1, mfu=0.25))
    observer.observe(EvaluationFinished(1, {"loss": 2.0}, 0.1))
    observer.close()
    (written,) = (tmp_path / "tensorboard").iterdir()
    content = written.read_bytes()
    for tag in (b"train/loss", b"train/tokens_per_s", b"train/mfu", b"validation/loss"):
        assert tag in content
    # Nothing is left that waits for a writer, which a full disk would end.
    assert not any("tensorboard" in type(thread).__module__.lower() for thread in threading.enumerate())


def test_a_full_disk_costs_an_observer_and_not_the_run(tmp_path):
    observer = TensorBoardObserver(tmp_path / "tensorboard")
    with EventBus([observer]) as bus, Path("/dev/full").open("wb", buffering=0) as full:
        bus.emit(started(tmp_path))
        record_writer = observer._writer._py_recordio_writer
        record_writer._writer.close()
        record_writer._writer = full
        bus.emit(finished(1))
        with pytest.warns(UserWarning, match="Observer TensorBoardObserver failed and is left out: OSError.*No space"):
            bus.flush()
        bus.emit(finished(2))


def terminal(*, live):
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=live, highlight=False, soft_wrap=True)
    return TerminalObserver(live=live, console=console), text


@pytest.mark.parametrize("live", [False, True])
def test_progress_names_loss_rate_and_time_left(tmp_path, live):
    observer, text = terminal(live=live)
    for event in (started(tmp_path), finished(9, mfu=0.25), finished(10, loss=1.5), RunFinished(10, {"loss": 1.5})):
        observer.observe(event)
    observer.close()
    shown = text.getvalue()
    assert "1,234 parameters" in shown
    assert "loss 1.5000  128 tokens/s" in shown
    assert ("step 10/10" in shown) is not live
    assert "finished at step 10" in shown


@pytest.mark.parametrize(
    ("metrics", "per_s", "expected"),
    [
        ({"loss": 3.14159e-6}, 0.18, "loss 3.1416e-06  0.18 pairs/s"),
        ({"loss": 5.71553, "reward": 0.03125}, 12_345.6, "loss 5.7155  reward 0.0312  12,346 pairs/s"),
    ],
)
def test_numbers_have_significant_digits(metrics, per_s, expected):
    event = StepFinished(1, metrics, 1.0, per_s, None)
    assert describe(event, "pairs", left_s=0.0, shown_metrics=("reward",)).startswith(expected)


def test_metrics_that_the_objective_selects_are_shown_beside_the_loss(tmp_path):
    observer, text = terminal(live=False)
    metrics = {"loss": 0.0, "flat_groups": 0.75, "reward": 0.125, "unnamed": 1.0, "sampled_tokens": 700.0}
    selected = {"shown_metrics": ("reward", "flat_groups", "unparsed"), "rate_metrics": ("sampled_tokens", "none")}
    observer.observe(dataclasses.replace(started(tmp_path), **selected))
    observer.observe(StepFinished(10, metrics, 0.5, 128.0, None))
    observer.observe(EvaluationFinished(10, metrics, 0.5))
    step, evaluation = text.getvalue().splitlines()[1:]
    assert step.startswith(
        "step 10/10  loss 0.0000  reward 0.125  flat groups 0.750  128 tokens/s  1,400 sampled tokens/s"
    )
    assert evaluation == "step 10  validation loss 0.0000  reward 0.125  flat groups 0.750  (0.5 s)"


def test_plain_progress_prints_only_now_and_then_but_always_the_last_step(tmp_path):
    observer, text = terminal(live=False)
    observer.observe(started(tmp_path))
    for step in range(1, 11):
        observer.observe(finished(step))
    assert [line.split("  ")[0] for line in text.getvalue().splitlines()[1:]] == ["step 1/10", "step 10/10"]


def test_unknown_peaks_show_no_mfu(tmp_path):
    observer, text = terminal(live=False)
    observer.observe(started(tmp_path))
    observer.observe(finished(10))
    observer.observe(CheckpointSaved(10, tmp_path / "00000010", 0.02))
    assert "MFU" not in text.getvalue()
    assert "saved 00000010 (training waited 20 ms)" in text.getvalue()


def test_the_history_says_when_a_run_began_and_how_each_part_of_it_ended(tmp_path):
    path = tmp_path / "history.jsonl"
    for last in (RunFinished(3, {}), RunFailed(Interrupted("Ctrl-C")), RunFailed(ValueError("bad")), StepStarted(4)):
        observer = HistoryObserver(path)
        for event in (started(tmp_path, first_step=2), finished(3), last):
            observer.observe(event)
        observer.close()
    records = lines_of(path)
    assert [(record["event"], record["step"]) for record in records[::2]] == [("started", 2)] * 4
    ends = [(record["event"], record["step"], record.get("error")) for record in records[1::2]]
    assert ends == [("finished", 3, None), ("stopped", 3, None), ("failed", 3, "ValueError: bad"), ("stopped", 3, None)]
    assert records[0]["work"] == ["tokens", 64] and records[0]["devices"].endswith("cpu")


def test_the_report_is_written_at_evaluations_and_at_every_end(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr("stack_train.observers.report.write_report", lambda *args: written.append(args))
    evaluated = EvaluationFinished(2, {"loss": 2.0}, 0.1)
    for events in ((evaluated,), (RunFinished(3, {}),), (RunFailed(ValueError()),), ()):
        observer = ReportObserver(tmp_path, {"output": "x"})
        observer.observe(started(tmp_path))
        for event in events:
            observer.observe(event)
        observer.close()
    assert written == [(tmp_path, {"output": "x"})] * 5
    ReportObserver(tmp_path, {}).close()  # a run that never started
    assert len(written) == 5


def test_reports_at_evaluations_take_a_hundredth_of_the_time(tmp_path, monkeypatch):
    now_s, written_s = 1000.0, []

    def slow(directory, config):
        nonlocal now_s
        written_s.append(now_s)
        now_s += 2.0

    monkeypatch.setattr("stack_train.observers.report.write_report", slow)
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    observer = ReportObserver(tmp_path, {})
    observer.observe(started(tmp_path))
    for _ in range(30):
        observer.observe(EvaluationFinished(2, {"loss": 2.0}, 0.1))
        now_s += 10.0
    assert written_s == [1000.0, 1202.0]


def test_what_the_history_and_the_metrics_hold_of_an_event_is_in_the_report(tmp_path):
    context = ObserverContext(tmp_path, {"model": {"name": "llama"}}, terminal=False)
    chosen = [registries.observers[name](context) for name in registries.observers.names() if name in WRITERS]
    with EventBus(chosen) as bus:
        for event in (started(tmp_path), finished(1, loss=1.25)):
            bus.emit(event)
    document = (tmp_path / "report.html").read_text()
    assert "Stopped at step 1" in document and "<dt>last loss</dt><dd>1.2500</dd>" in document
