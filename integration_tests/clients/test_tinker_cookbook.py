"""The unmodified supervised loop of tinker-cookbook against `stack rl serve`.

The loop names a model and a data set of the Hugging Face hub. In its working directory, these names are directories:
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

from ..served import write_checkpoint
from .test_tinker import KEY, TinkerServer

pytestmark = pytest.mark.clients("tinker_cookbook", "torch")
# For which the cookbook renders conversations as "User: ...", without special tokens.
MODEL = "meta-llama/Llama-3.2-1B"
STEPS, BATCH = 30, 8


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
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "PreTrainedTokenizerFast"}))
    answer, numbers = {"role": "assistant", "content": "abc"}, range(BATCH * STEPS)
    chats = [{"messages": [{"role": "user", "content": f"say {number}"}, answer]} for number in numbers]
    write_records(folder / "HuggingFaceH4/no_robots/train.jsonl", chats)
    return folder


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


def test_the_supervised_loop_learns(folder: Path, server: TinkerServer) -> None:
    losses = [each["train_mean_nll"] for each in metrics_of("sl_loop", server, folder, learning_rate=0.02)]
    assert len(losses) == STEPS and losses[0] > 4 and losses[-1] < losses[0] / 2, losses
