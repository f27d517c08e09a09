"""The unmodified loops of tinker-cookbook against `stack rl serve`.

The supervised loop learns to answer with a boxed digit, each of `DIGITS` equally often. The reinforcement loop resumes
from its weights, and learns which of the digits is rewarded.

The loops name a model and data sets of the Hugging Face hub. In their working directory, these names are directories:
the tokenizer of the served model, and JSON lines.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from ..served import VOCAB, write_checkpoint
from .test_tinker import KEY, TinkerServer

pytestmark = pytest.mark.clients("tinker_cookbook", "torch")
# For which the cookbook renders conversations as "User: ...", without special tokens.
MODEL = "meta-llama/Llama-3.2-1B"
STEPS, RL_STEPS, BATCH = 120, 40, 8
DIGITS, REWARDED = "357", "7"
# rl_loop puts these before and after every question.
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
STRAWBERRY = "How many r's are in strawberry?"
SPELLED = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have "
    "r's at positions 3, 8, and 9."
)
SHOT = [
    {"role": "user", "content": STRAWBERRY + SUFFIX},
    {"role": "assistant", "content": f"{SPELLED} \\boxed{{3}}"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cookbook")
    model = folder / MODEL
    model.mkdir(parents=True)
    write_checkpoint(model)
    weights = load_file(model / "model.safetensors")
    # Flatter, so that the first loss is close to log(VOCAB).
    weights["lm_head.weight"] /= np.float32(2)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    # A token for each long text, which makes the prompts of rl_loop four times shorter.
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([SUFFIX, STRAWBERRY, SPELLED, " \\boxed{"])
    assert tokenizer.get_vocab_size() <= VOCAB
    tokenizer.save(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    chats = [chat(question(number), DIGITS[number % len(DIGITS)]) for number in range(BATCH * STEPS)]
    write_records(folder / "HuggingFaceH4/no_robots/train.jsonl", chats)
    tasks = [{"question": question(number), "answer": f"#### {REWARDED}"} for number in range(BATCH * RL_STEPS)]
    write_records(folder / "openai/gsm8k/train.jsonl", tasks)
    # rl_loop asks for this configuration by name.
    configs = "configs:\n- config_name: main\n  data_files:\n  - {split: train, path: train.jsonl}"
    (folder / "openai/gsm8k/README.md").write_text(f"---\n{configs}\n---\n")
    return folder


def question(number: int) -> str:
    return f"What is my digit on day {number}?"


def chat(text: str, digit: str) -> dict[str, Any]:
    answer = {"role": "assistant", "content": f"\\boxed{{{digit}}}"}
    return {"messages": [*SHOT, {"role": "user", "content": text + SUFFIX}, answer]}


def write_records(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in records))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TinkerServer]:
    server = TinkerServer(folder, folder / MODEL, "--model-name", MODEL)
    yield server
    assert "Traceback" not in server.stop()


def metrics_of(name: str, server: TinkerServer, folder: Path, **settings: Any) -> list[dict[str, float]]:
    """Runs a loop as its command, and returns its metrics by step."""
    log = folder / name
    given = {"base_url": server.address, "model_name": MODEL, "log_path": log, "lora_rank": 8, **settings}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    subprocess.run(
        [
            *(sys.executable, "-m", f"tinker_cookbook.recipes.{name}"),
            # Weights do not expire on this server.
            *(f"{key}={value}" for key, value in (given | {"batch_size": BATCH, "ttl_seconds": None}).items()),
        ],
        env={**os.environ, **offline, "TINKER_API_KEY": KEY, "TINKER_TELEMETRY": "0"},
        cwd=folder,
        check=True,
        timeout=900,
    )
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert saved[-1]["name"] == "final" and saved[-1]["sampler_path"].startswith("tinker://")
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def losses(folder: Path, server: TinkerServer) -> list[float]:
    """The losses of the supervised loop."""
    options = {"learning_rate": 0.02, "train_on_what": "last_assistant_message"}
    return [each["train_mean_nll"] for each in metrics_of("sl_loop", server, folder, **options)]


def test_the_supervised_loop_learns(losses: list[float]) -> None:
    assert len(losses) == STEPS and losses[0] > 4 and losses[-1] < losses[0] / 2, losses


@pytest.mark.usefixtures("losses")
def test_the_reinforcement_loop_raises_its_mean_reward(folder: Path, server: TinkerServer) -> None:
    saved = json.loads((folder / "sl_loop/checkpoints.jsonl").read_text().splitlines()[-1])
    # The loop resumes from the last state in its log, which is the only way for it to begin with trained weights.
    (folder / "rl_loop").mkdir()
    (folder / "rl_loop/checkpoints.jsonl").write_text(json.dumps({**saved, "name": "start", "batch": 0}) + "\n")
    options = {"loss_fn": "importance_sampling", "group_size": 8, "max_tokens": 8, "learning_rate": 0.003}
    metrics = metrics_of("rl_loop", server, folder, **options)
    rewards = [each["reward/total"] for each in metrics]
    assert len(rewards) == RL_STEPS, rewards
    # The server's adapters and samples have random seeds: two runs ended at 0.48 and 0.59.
    assert np.mean(rewards[:5]) < 0.15 and np.mean(rewards[-5:]) > 0.25, rewards
