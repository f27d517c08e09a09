"""Supervised fine-tuning and preferences, end to end: a run from scratch, a chat run from it, DPO from that."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

import stack_train
from stack_core.abi.config import apply_overrides, parse
from stack_core.abi.errors import DataError
from stack_quant import quantize
from stack_train.run.config import RunConfig, run_config
from stack_train.run.train import train

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MODEL = {"name": "llama", "vocab_size": 280, "layers": 1, "embed": 32, "heads": 2, "mlp": 48, "dtype": "float32"}
SMALL = {"model": MODEL, "optimizer": {"learning_rate": 0.01}, "checkpoint": {"every_steps": 4}}


def jsonl(path: Path, records: list[dict]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def run(output: Path, **sections):
    return parse(RunConfig, apply_overrides({**SMALL, **sections, "output": str(output)}, []))


def losses(output: Path, name: str = "loss") -> list[float]:
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [record[name] for record in records if record["kind"] == "train"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a little text, with its tokenizer."""
    root = tmp_path_factory.mktemp("base")
    (root / "text.txt").write_text("user: red or blue? assistant: red. user: up or down? assistant: up. " * 40)
    source = {"source": f"text:{root}/*.txt", "vocab_size": 280, "seq_tokens": 32, "validation_fraction": 0.0}
    train(run(root / "run", data=source | {"batch_size": 4}, run={"steps": 8}))
    return root / "run"


@pytest.fixture(scope="module")
def template(base: Path) -> str:
    path = base.parent / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def test_a_chat_run_starts_from_a_run_with_its_tokenizer_and_learns(base, template, tmp_path):
    talks = [
        {"messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]}
        for word in ("red", "blue", "up", "down") * 4
    ]
    data = {"name": "chat", "source": jsonl(tmp_path / "chat.jsonl", talks), "chat_template": template}
    sizes = {"seq_tokens": 48, "batch_size": 4, "validation_fraction": 0.1}
    config = run(tmp_path / "sft", data=data | sizes, run={"steps": 24, "init_from": str(base)})
    summary = train(config)
    found = losses(tmp_path / "sft")
    assert summary.validation_loss is not None and found[-1] < 0.5 * found[0]
    assert (tmp_path / "sft" / "tokenizer" / "tokenizer.json").read_bytes() == (
        base / "tokenizer" / "tokenizer.json"
    ).read_bytes()


def preferences(template: str, tmp_path: Path) -> dict:
    """The sections of a run that learns which of two answers is better."""
    rng = np.random.default_rng(0)
    words = ["red", "blue", "up", "down", "left", "warm"]
    pairs = [
        {"prompt": f"{a} or {b}?", "chosen": f"{a}", "rejected": f"not {a}"}
        for a, b in (rng.choice(words, 2, replace=False) for _ in range(40))
    ]
    data = {"name": "preferences", "source": jsonl(tmp_path / "pairs.jsonl", pairs), "chat_template": template}
    sizes = {"seq_tokens": 48, "batch_size": 8, "validation_fraction": 0.2}
    return {"data": data | sizes, "objective": {"name": "dpo"}}


CONSTANT = {"optimizer": {"learning_rate": 0.01, "schedule": {"decay": "constant"}}}


def test_dpo_raises_the_margin_of_held_out_pairs_and_resumes_bitwise(base, template, tmp_path):
    sections = preferences(template, tmp_path)
    whole = run(tmp_path / "whole", **sections, run={"steps": 12, "init_from": str(base)})
    train(whole)
    margins = losses(tmp_path / "whole", "margin")
    assert abs(margins[0]) < 1e-5 and losses(tmp_path / "whole")[0] == pytest.approx(np.log(2), rel=1e-5)
    records = map(json.loads, (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
    held_out = [record for record in records if record["kind"] == "evaluation"][-1]
    assert held_out["margin"] > 0.1 and held_out["accuracy"] > 0.9

    # Without its last checkpoint a run goes on from the one before.
    cut = run(tmp_path / "cut", **sections, run={"steps": 12, "init_from": str(base)})
    shutil.copytree(whole.output, cut.output)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "00000012")
    train(cut, resume=True)
    for name in ("loss", "margin"):
        assert losses(tmp_path / "cut", name) == losses(tmp_path / "whole", name)
    ends = [(tmp_path / name / "checkpoints" / "00000012" / "manifest.json").read_text() for name in ("cut", "whole")]
    leaves = [json.loads(end)["content"]["leaves"] for end in ends]
    assert leaves[0] == leaves[1]

    result = quantize(tmp_path / "whole", "w8a8", algorithm="nearest")
    assert result.targets == 8 and result.loss_after == pytest.approx(result.loss_before, rel=0.1)
    assert stack_train.load(result.destination).generate("red", max_tokens=2)
    for number in range(40):
        (tmp_path / f"note{number}.txt").write_text(f"red or blue, up or down, and {number} more. " * 40)
    options = {"data": f"text:{tmp_path}/note*.txt", "algorithm": "nearest", "evaluation_batches": 0}
    quantize(tmp_path / "whole", "w8a8", out=tmp_path / "by_texts", **options)
    assert run_config(tmp_path / "by_texts").objective.name == "dpo"
    (tmp_path / "whole" / "reference_logprobs.npz").unlink()
    with pytest.raises(DataError, match=r"reference_logprobs.npz cannot be read.*Restore the file"):
        quantize(tmp_path / "whole", "w8a8", out=tmp_path / "other")


@pytest.mark.slow
def test_two_processes_score_and_learn_preferences_as_one_does(base, template, tmp_path):
    """Each scores all pairs by the first weights together with the other, and makes its own pairs of a batch."""
    sections = preferences(template, tmp_path) | CONSTANT
    train(run(tmp_path / "one", **sections, run={"steps": 8, "init_from": str(base)}))
    sections = {**SMALL, **sections, "mesh": {"fsdp": 2}, "output": str(tmp_path / "two")}
    for steps, arguments in ((4, ()), (8, ("--resume",))):
        settings = tmp_path / "run.yaml"
        settings.write_text(yaml.safe_dump({**sections, "run": {"steps": steps, "init_from": str(base)}}))
        in_two_processes(settings, *arguments)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-4)


def in_two_processes(settings: Path, *arguments: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        together = ["--processes.count", "2", "--processes.coordinator", f"127.0.0.1:{free.getsockname()[1]}"]
    command = [sys.executable, "-m", "stack_core", "train", str(settings), *together, *arguments]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    started = [
        subprocess.Popen([*command, "--processes.id", each], env=environment, stderr=subprocess.PIPE, text=True)
        for each in "01"
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], said


@pytest.mark.slow  # DPO above has the same data; packages/rl/tests/objectives/test_preference.py has the losses
@pytest.mark.parametrize("name", ["ipo", "orpo", "simpo"])
def test_other_objectives_on_pairs_learn_what_is_preferred(name, base, template, tmp_path):
    words = ["red", "blue", "up", "down", "left", "warm"]
    pairs = [{"prompt": f"{a} or {b}?", "chosen": a, "rejected": f"not {a}"} for a in words for b in words if a != b]
    data = {"name": "preferences", "source": jsonl(tmp_path / "pairs.jsonl", pairs), "chat_template": template}
    sizes = {"seq_tokens": 48, "batch_size": 8, "validation_fraction": 0.2, "reference": name == "ipo"}
    sections = {"data": data | sizes, "objective": {"name": name}}
    train(run(tmp_path / "run", **sections, run={"steps": 10, "init_from": str(base)}))
    margins = losses(tmp_path / "run", "margin")
    assert margins[-1] > margins[0] + 0.1
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]


def test_kto_learns_from_labels_and_its_run_is_quantized_on_them(base, template, tmp_path):
    words = ["red", "blue", "up", "down"]
    answers = [
        {"prompt": f"{a} or {b}?", "completion": answer, "label": label}
        for a in words
        for b in words
        if a != b
        for answer, label in ((a, True), (f"not {a}", False))
    ]
    data = {"name": "judged", "source": jsonl(tmp_path / "answers.jsonl", answers), "chat_template": template}
    sizes = {"seq_tokens": 48, "batch_size": 8, "validation_fraction": 0.25}
    sections = {"data": data | sizes, "objective": {"name": "kto"}}
    train(run(tmp_path / "run", **sections, run={"steps": 10, "init_from": str(base)}))
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0]

    result = quantize(tmp_path / "run", "w8a8", out=tmp_path / "by_labels", algorithm="gptq", calibration_batches=2)
    assert result.targets > 0 and result.loss_after == pytest.approx(result.loss_before, rel=0.02)
    assert 0 < result.loss_before < 1  # bounds of the loss of KTO


@pytest.mark.slow
def test_dpo_finds_a_hidden_utility_of_letters(base, template, tmp_path):
    """2,000 pairs without noise: the better answer has the higher sum of its letters' hidden worths."""
    rng = np.random.default_rng(0)
    letters, worths = list("abcdefgh"), rng.permutation(8)
    pairs = []
    while len(pairs) < 2000:
        answers = rng.integers(8, size=(2, 4))
        low, high = np.argsort(worths[answers].sum(1))
        if worths[answers].sum(1)[low] < worths[answers].sum(1)[high]:
            chosen, rejected = (" ".join(letters[i] for i in answers[each]) for each in (high, low))
            pairs.append({"prompt": "best?", "chosen": chosen, "rejected": rejected})
    data = {"name": "preferences", "source": jsonl(tmp_path / "pairs.jsonl", pairs), "chat_template": template}
    sizes = {"seq_tokens": 40, "batch_size": 32, "validation_fraction": 0.1}
    sections = {"data": data | sizes, "objective": {"name": "dpo"}}
    train(run(tmp_path / "run", **sections, run={"steps": 300, "init_from": str(base)}))
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    held_out = [record for record in records if record["kind"] == "evaluation"][-1]
    assert held_out["accuracy"] >= 0.95
