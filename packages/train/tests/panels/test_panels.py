"""The report of a run that was written by hand: what its panels say of its files."""

import html
import json
import re

import pytest

from stack_train.panels.curves import curves
from stack_train.panels.run_report import write_report
from stack_train.panels.summary import summary

CONFIG = {
    "model": {"name": "llama", "layers": 3, "embed": 1536, "tie_embeddings": True},
    "data": {"name": "text", "source": "stdlib"},
    "objective": {"name": "causal_lm"},
    "optimizer": {"name": "adamw", "learning_rate": 4e-3},
    "run": {"steps": 400, "init_from": None},
    "mesh": {"data": 1, "fsdp": -1, "tensor": 2},
}
STARTED = {"steps": 400, "parameters": 1234567, "work": ["tokens", 64], "compile_s": 2.5, "devices": "2 x cpu"}


def train(step, **metrics):
    rates = {"tokens_per_s": 128.0 * step, "mfu": None, "duration_s": 0.5}
    return {
        "kind": "train",
        "step": step,
        "loss": 4.0 / step,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        **rates,
        **metrics,
    }


def evaluation(step, loss):
    return {"kind": "evaluation", "step": step, "loss": loss, "duration_s": 0.1}


def moment(event, seconds, step, **facts):
    return {"event": event, "time": f"2026-01-02T03:04:{seconds:02}.000+00:00", "step": step, **facts}


@pytest.fixture
def run(tmp_path):
    """Writes a run's files; returns its directory."""

    def written(metrics=(), history=(), torn=""):
        for name, records in (("metrics", metrics), ("history", history)):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / f"{name}.jsonl").write_text(text + torn)
        return tmp_path

    return written


def facts_in(fragment):
    return {name: html.unescape(value) for name, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", fragment.body)}


def heights_of(path):
    return [float(place.split(",")[1]) for place in path.split()]


def titles_in(fragment):
    return re.findall(r"<figcaption>(.*?)</figcaption>", fragment.body)


def test_the_summary_says_what_was_trained_and_how_it_went(run):
    metrics = [train(1), train(2), evaluation(2, 2.5), train(3), evaluation(3, 2.75)]
    history = [moment("started", 10, 0, **STARTED), moment("finished", 15, 3)]
    shown = summary(run(metrics, history), CONFIG)
    assert facts_in(shown) == {
        "steps": "3 of 400",
        "last loss": "1.3333",
        "last held-out loss": "2.7500",
        "best held-out loss": "2.5000, step 2",
        "tokens trained": "192",
        "duration": "5.0 s",
        "step, median": "500 ms",
        "tokens/s": "256",
        "mfu": "-",
        "model": "llama",
        "parameters": "1,234,567",
        "data": "text stdlib",
        "tokens in a step": "64",
        "objective": "causal_lm",
        "optimizer": "adamw",
        "learning rate": "0.004",
        "devices": "2 x cpu",
        "mesh": "tensor 2",
        "compiled in": "2.5 s",
    }
    assert "Finished at step 3, 2026-01-02 03:04:15 UTC." in shown.body
    assert "The model&#x27;s sizes: layers 3, embed 1,536." in shown.body


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (moment("failed", 20, 7, error="NonFiniteLoss: <nan>"), "Failed after step 7, .*NonFiniteLoss: &lt;nan&gt;"),
        (moment("stopped", 20, 7), "Stopped at step 7, "),
        (moment("started", 20, 7, **STARTED), "the run is still running, or was killed"),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_the_summary_says_how_the_run_ended(run, last, said):
    begun = [] if last["event"] == "started" else [moment("started", 0, 0, **STARTED)]
    shown = summary(run([train(1)], [*begun, last]), CONFIG)
    assert re.search(said, shown.body)
    assert facts_in(shown)["duration"] == ("20.0 s" if begun else "0.5 s in steps")


def test_a_run_that_was_killed_and_resumed_lists_its_parts_and_changes(run):
    history = [moment("started", 0, 0, **STARTED), moment("started", 9, 2, **STARTED), moment("finished", 12, 3)]
    directory = run([train(1), train(2), train(3)], history, torn='{"event": "sta')
    (directory / "changes.jsonl").write_text('{"time": "today", "changes": ["optimizer.learning_rate: 1, not 2"]}\n')
    shown = summary(directory, CONFIG)
    parts = re.findall(r"<li>(.*?)</li>", shown.body)
    assert [part.partition(": ")[2] for part in parts[:3]] == [
        "started at step 0",
        "started at step 2",
        "finished at step 3",
    ]
    assert parts[3] == "changed when resumed, today: optimizer.learning_rate: 1, not 2"
    assert facts_in(shown)["duration"] == "1.5 s in steps"


def test_a_run_without_records_is_dashes_and_has_no_curves(run):
    shown = summary(run(), {})
    assert facts_in(shown)["last loss"] == "-" and "is not recorded" in shown.body
    assert curves(run(), {}) is None


def test_every_metric_has_its_chart_and_the_loss_has_both_curves(run):
    metrics = [train(step, balance_loss=1.0 + step, note="text") for step in (1, 2, 3)]
    shown = curves(run([*metrics, evaluation(2, 2.0), evaluation(3, 1.5)]), CONFIG)
    assert titles_in(shown) == [
        "loss", "learning rate", "gradient norm", "tokens/s", "time of a step", "balance loss",
    ]  # fmt: skip
    loss, rest = shown.body.split('class="small plots"')
    assert loss.count("<polyline") == 2 and ">training<" in loss and ">held out<" in loss
    assert rest.count("<polyline") == 5 and "Nothing to draw" not in shown.body


def test_a_long_noisy_loss_is_smoothed_over_its_faint_self(run):
    shown = curves(run([train(step, loss=4.0 + step % 2) for step in range(1, 401)]), CONFIG)
    faint, smooth = re.findall(r'<polyline points="([^"]+)" class="([^"]+)"', shown.body)[:2]
    assert (faint[1], smooth[1]) == ("faint curve c0", "curve c0") and "means over 9 steps" in shown.body
    spread = [max(heights) - min(heights) for heights in map(heights_of, (faint[0], smooth[0]))]
    assert spread[0] == 248 and spread[1] < 50


def test_one_evaluation_is_a_dot(run):
    assert curves(run([train(1), train(2), evaluation(2, 2.0)]), CONFIG).body.count("<circle") == 1


def test_the_report_of_all_packages_has_both_panels_and_refers_to_nothing_outside(run):
    directory = run([train(1), train(2)], [moment("started", 0, 0, **STARTED)])
    assert write_report(directory, CONFIG) == ()
    document = (directory / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)">', document)[:2] == ["summary", "curves"]
    assert "://" not in document and "url(" not in document and "<script" not in document
