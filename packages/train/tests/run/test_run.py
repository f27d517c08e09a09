"""Whole runs on a tiny model and real files: what they write, how they resume, what they refuse."""

import json
import os
import signal
import time

import jax
import numpy as np
import pytest

from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_core.abi.errors import ConfigError, DataError, Interrupted, NonFiniteLoss, RunDirectoryError, ShardingError
from stack_core.abi.events import StepFinished
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.processes import Processes
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.data.kinds.text import TextData
from stack_train.data.settings import MixedSource
from stack_train.run import train as run
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program
from stack_train.run.run import build_data

CONFIG = {
    "model": {
        "name": "llama",
        "vocab_size": 280,
        "layers": 2,
        "embed": 16,
        "heads": 2,
        "mlp": 24,
        "dtype": "float32",
    },
    "data": {"seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0},
    "optimizer": {"name": "adamw", "learning_rate": 0.01},
    "run": {"steps": 6},
    "checkpoint": {"every_steps": 2, "keep": 10},
}


@pytest.fixture
def config_of(tmp_path, monkeypatch):
    """Builds configs over a small corpus; `config_of("section.key=value", ...)`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "return", "yield", "(x)", "\n"]
    for number in range(20):
        (texts / f"{number}.txt").write_text(" ".join(rng.choice(words, 200)))

    def build(*overrides):
        base = apply_overrides(CONFIG, [f"data.source=text:{texts}/*.txt", f"output={tmp_path / 'run'}"])
        return parse(RunConfig, apply_overrides(base, overrides))

    return build


def final_state(config):
    """The newest checkpoint's leaves, as NumPy arrays by path."""
    program = build_program(config)
    with CheckpointStore(RunDirectory(config_path(config)).checkpoints) as store:
        state = store.restore(program.abstract_state).state
    return {name: np.asarray(leaf) for name, leaf in named_leaves(jax.tree.map(_plain, state)).items()}


def _plain(leaf):
    return jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def config_path(config):
    from pathlib import Path

    return Path(config.output)


def records(config):
    return [json.loads(line) for line in (config_path(config) / "metrics.jsonl").read_text().splitlines()]


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def test_a_run_writes_its_config_metrics_tokenizer_and_checkpoints(config_of):
    config = config_of("run.evaluate_every_steps=3", "data.validation_fraction=0.2")
    summary = run.train(config)
    path = config_path(config)
    assert summary.step == 6 and summary.directory == path
    assert np.isfinite([summary.loss, summary.validation_loss, summary.work_per_s]).all()
    assert parse(RunConfig, load_yaml(path / "config.yaml")).model == config.model
    assert (path / "tokenizer" / "tokenizer.json").exists()
    assert [(record["kind"], record["step"]) for record in records(config)] == [
        *(("train", step) for step in (1, 2, 3)),
        ("evaluation", 3),
        *(("train", step) for step in (4, 5, 6)),
        ("evaluation", 6),
    ]
    with CheckpointStore(path / "checkpoints") as store:
        assert store.steps() == (2, 4, 6)


def test_an_evaluation_without_held_out_examples_is_reported(config_of):
    config = config_of("run.steps=2", "run.evaluate_every_steps=1", "data.validation_fraction=0")
    with pytest.warns(UserWarning, match=r"evaluate_every_steps is 1, but nothing is evaluated: .* 'text' has no held"):
        summary = run.train(config)
    assert summary.validation_loss is None


def test_every_second_of_a_run_is_given_to_an_activity(config_of):
    config = config_of("data.validation_fraction=0.2", "data.packing=best_fit", "run.evaluate_every_steps=3")
    started_s = time.perf_counter()
    run.train(config)
    wall_s = time.perf_counter() - started_s
    (session,) = (
        json.loads(line)["seconds"] for line in (config_path(config) / "goodput.jsonl").read_text().splitlines()
    )
    assert 0.99 * wall_s <= sum(session.values()) <= wall_s
    assert all(session[activity] > 0 for activity in ("starting", "compiling", "training", "evaluating", "saving"))
    assert "was training, in one session whose end" in (config_path(config) / "report.html").read_text()


def test_a_resumed_run_ends_bitwise_like_an_uninterrupted_one(config_of, tmp_path):
    whole, cut = config_of(f"output={tmp_path / 'whole'}"), config_of(f"output={tmp_path / 'cut'}")
    run.train(whole)

    def stop_at_3(self, dispatched, original=run.TrainingLoop._finish):
        original(self, dispatched)
        if dispatched is not None and dispatched.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.TrainingLoop, "_finish", stop_at_3)
        stopped = run.train(cut)
    assert stopped.stopped_by == "SIGTERM" and 3 <= stopped.step < 6
    assert run.train(cut, resume=True).step == 6
    assert_equal(final_state(whole), final_state(cut))
    assert [record["loss"] for record in records(whole)] == [record["loss"] for record in records(cut)]


def test_smaller_batches_at_the_start_have_the_same_rows_and_resume_bitwise(config_of, tmp_path):
    ramp = "run.ramp=[{rows: 1, steps: 4}]"
    whole, cut = config_of(f"output={tmp_path / 'whole'}", ramp), config_of(f"output={tmp_path / 'cut'}", ramp)
    summary = run.train(whole)
    work = [round(record["tokens_per_s"] * record["duration_s"]) for record in records(whole)]
    assert work == [16, 16, 16, 16, 64, 64]
    state = CheckpointStore(tmp_path / "whole" / "checkpoints").restore(build_program(whole).abstract_state).data_state
    assert state["batches"]["batches"] == 3 and state["step"] == 6
    assert summary.work_per_s > 0

    def stop_inside_of_a_batch(self, dispatched, original=run.TrainingLoop._finish):
        original(self, dispatched)
        if dispatched is not None and dispatched.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.TrainingLoop, "_finish", stop_inside_of_a_batch)
        assert run.train(cut).step in (2, 3)
    assert run.train(cut, resume=True).step == 6
    assert_equal(final_state(whole), final_state(cut))
    with pytest.raises(ConfigError, match=r"run\.ramp"):
        run.train(config_of(f"output={tmp_path / 'cut'}", "run.steps=8"), resume=True)


def test_a_run_ends_at_its_limit_of_time_and_resumes(config_of, tmp_path):
    config = config_of("run.minutes=1e-9", "checkpoint.every_steps=0")
    stopped = run.train(config)
    assert (stopped.step, stopped.stopped_by) == (0, "SIGALRM")
    resumed = run.train(config_of("run.minutes=100", "checkpoint.every_steps=0"), resume=True)
    assert (resumed.step, resumed.stopped_by) == (6, None)
    with pytest.raises(ConfigError, match=r"run\.minutes .* cluster\.hosts"):
        run.build(config_of(f"output={tmp_path / 'hosts'}", "run.minutes=1", "cluster.hosts=2"))


@pytest.mark.parametrize(("held_out", "stopped_by"), [(0.0, None), (0.3, "SIGTERM")], ids=["nothing", "some"])
def test_a_signal_in_the_last_step_cuts_only_an_evaluation(config_of, monkeypatch, held_out, stopped_by):
    def stop(self, dispatched, original=run.TrainingLoop._finish):
        original(self, dispatched)
        if dispatched is not None and dispatched.step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(run.TrainingLoop, "_finish", stop)
    config = config_of(f"data.validation_fraction={held_out}")
    summary = run.train(config)
    assert (summary.step, summary.stopped_by) == (6, stopped_by)
    assert not [each for each in records(config) if each["kind"] == "evaluation"]


def test_an_evaluation_that_a_kill_cut_short_is_made_up_once(config_of):
    config = config_of("data.validation_fraction=0.3", "run.evaluate_every_steps=2")

    def killed(self, step, state):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run.TrainingLoop, "_report_evaluation", killed)
        run.train(config)

    def stop(self, dispatched, original=run.TrainingLoop._finish):
        original(self, dispatched)
        if dispatched is not None and dispatched.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.TrainingLoop, "_finish", stop)
        run.train(config, resume=True)
    run.train(config, resume=True)
    evaluated = [record["step"] for record in records(config) if record["kind"] == "evaluation"]
    assert evaluated == [2, 4, 6]


def test_ctrl_c_saves_and_says_how_to_go_on(config_of, monkeypatch):
    config = config_of()

    def interrupt(self, dispatched, original=run.TrainingLoop._finish):
        original(self, dispatched)
        if dispatched is not None and dispatched.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(run.TrainingLoop, "_finish", interrupt)
    with pytest.raises(
        Interrupted, match=r"Stopped by Ctrl-C after step .* of 6; it is saved. Add --resume to continue"
    ):
        run.train(config)
    with CheckpointStore(config_path(config) / "checkpoints") as store:
        assert store.latest() in (3, 4)


def test_a_longer_run_goes_on_from_a_finished_one(config_of):
    run.train(config_of())
    summary = run.train(config_of("run.steps=9"), resume=True)
    assert summary.step == 9
    assert [record["step"] for record in records(config_of()) if record["kind"] == "train"] == list(range(1, 10))


def test_a_run_that_was_killed_before_its_first_checkpoint_resumes_from_the_start(config_of):
    config = config_of()
    directory = RunDirectory(config_path(config))
    directory.path.mkdir()
    directory.config.write_text(_resolved(config))
    assert run.train(config, resume=True).step == 6


def _resolved(config):
    from stack_core.abi.config import to_yaml

    return to_yaml(config)


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("data.vocab_size=288", ConfigError, "tokenizer has 288 tokens, but model.vocab_size is 280"),
        ("model.max_positions=8", ConfigError, "seq_tokens is 16, but model.max_positions is 8"),
        ("run.accumulation_steps=3", ConfigError, "batch_size 4 is not a multiple"),
        ("cluster.deadline_s=5", ConfigError, "cluster.deadline_s is 5.0, which has no effect without cluster.hosts"),
        ("run.pipeline.microbatches=2", ConfigError, "run.pipeline.microbatches is 2, which has no effect without"),
        ("data.source=text:nowhere/*.txt", DataError, "nowhere"),
        ("mesh.tensor=64", ShardingError, "64"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(config_of, override, error, message):
    config = config_of(override)
    with pytest.raises(error, match=message):
        run.train(config)
    assert not config_path(config).exists()


def test_a_directory_with_another_run_is_refused_and_left_alone(config_of):
    config = config_of("run.steps=2")
    run.train(config)
    before = {path: path.stat().st_mtime_ns for path in config_path(config).rglob("*")}
    with pytest.raises(RunDirectoryError, match="holds another run"):
        run.train(config)
    with pytest.raises(ConfigError, match=r"model.layers: 3, not 2"):
        run.train(config_of("model.layers=3"), resume=True)
    with pytest.raises(ConfigError, match=r"model.vocab_size: 270, not 280"):
        run.train(config_of("model.vocab_size=270"), resume=True)
    with pytest.raises(RunDirectoryError, match="nothing to resume"):
        run.train(config_of("output=elsewhere"), resume=True)
    assert {path: path.stat().st_mtime_ns for path in config_path(config).rglob("*")} == before


def test_files_of_a_failed_start_are_not_taken_over(config_of):
    config = config_of()
    directory = config_path(config)
    stale = [directory / name for name in ("tokenizer/of_another.json", "reference_logprobs.npz", "encoders.json")]
    (directory / "tokenizer").mkdir(parents=True)
    for path in (directory / "run.lock", *stale):
        path.write_text("")
    run.train(config)
    assert not any(path.exists() for path in stale)
    assert any((directory / "tokenizer").iterdir())


def test_two_trainers_cannot_share_a_directory(config_of):
    config = config_of("run.steps=2")
    run.train(config)
    with RunDirectory(config_path(config)).open(resume=True), pytest.raises(RunDirectoryError, match=str(os.getpid())):
        run.train(config_of("run.steps=4"), resume=True)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_documents(config_of):
    config = config_of("optimizer.learning_rate=1e30", "optimizer.clip_norm=null", "checkpoint.every_steps=1")
    with pytest.raises(NonFiniteLoss, match=r"Step \d+: loss is .*grad_norm is (nan|inf)") as caught:
        run.train(config)
    assert ".txt (lines" in str(caught.value)
    assert "last checkpoint is step" in str(caught.value)
    assert all(np.isfinite(record["loss"]) for record in records(config))


def test_the_step_is_compiled_exactly_once(config_of, tmp_path):
    compilations = []

    def count(event, duration_s, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    counts = []
    for steps in (3, 12):
        compilations.clear()
        run.train(config_of(f"run.steps={steps}", f"output={tmp_path / str(steps)}"))
        counts.append(len(compilations))
    assert counts[1] <= counts[0]
    assert counts[0] > 0


def test_rates_are_measured_between_completions(config_of, monkeypatch):
    import time

    seen = []
    original = run.EventBus.emit
    monkeypatch.setattr(run.EventBus, "emit", lambda self, event: (seen.append(event), original(self, event)))
    started_s = time.perf_counter()
    run.train(config_of("run.steps=20"))
    wall_s = time.perf_counter() - started_s
    durations_s = [event.duration_s for event in seen if isinstance(event, StepFinished)]
    assert len(durations_s) == 20
    assert 0 < sum(durations_s) < wall_s


def test_a_mixture_reports_its_shares_and_resumes_only_with_its_files(config_of, tmp_path):
    mix = {
        name: {"source": f"text:{tmp_path}/texts/{glob}.txt", "weight": weight}
        for name, glob, weight in (("early", "?", 3), ("late", "1?", 1))
    }
    config = config_of("data.source=stdlib", f"data.mix={json.dumps(mix)}", "run.steps=3")
    run.train(config)
    steps = [each for each in records(config) if "early_share" in each]
    assert [(each["early_share"], each["late_share"]) for each in steps] == [(0.75, 0.25)] * 3
    epochs = [each["late_epochs"] for each in steps]
    assert epochs[0] > 0 and epochs == pytest.approx([epochs[0], 2 * epochs[0], 3 * epochs[0]])
    (tmp_path / "texts" / "1x.txt").write_text("more")
    with pytest.raises(ConfigError, match=r"data.mix.late.source: .*1x.txt was added"):
        run.train(config, resume=True)
    (tmp_path / "texts" / "1x.txt").unlink()
    mix["late"]["weight"] = 2
    with pytest.raises(ConfigError, match=r"data.mix.late.weight: 2.0, not 1.0"):
        run.train(config_of("data.source=stdlib", f"data.mix={json.dumps(mix)}", "run.steps=3"), resume=True)


def test_no_process_waits_for_prepared_data():
    calls = []

    class Recorded(Processes):
        def in_turn(self, label, function):
            calls.append(label)
            return function()

    processes = Recorded()
    assert build_data(processes, TextData(source="prepared:set"), lambda: 1) == 1
    assert not calls
    mixed = TextData(mix={name: MixedSource(source=f"{name}:set") for name in ("prepared", "text")})
    assert build_data(processes, mixed, lambda: 2) == build_data(processes, TextData(), lambda: 2) == 2
    assert calls == ["data", "data"]
