"""Post-training of Hugging Face models: preferences, then rewards of what stack-serve's engine draws, and back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from stack_train.huggingface import FORMAT
from stack_train.run.resolve import parse_run
from stack_train.run.train import train

from .conftest import PLAIN

pytestmark = [pytest.mark.parity, pytest.mark.slow]

LETTERS = "abcdefgh:"
END = "<end>"
SIZES = PLAIN | {"vocab_size": 16, "num_hidden_layers": 2, "eos_token_id": 9, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        # By default token 0 is padding, whose embedding is zero; no norm has a finite gradient of that for many layers.
        {"num_hidden_layers": 6, "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "pad_token_id": 15},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a tiny random model with a tokenizer of letters."""
    config, causal, sizes = FAMILIES[request.param]
    directory = tmp_path_factory.mktemp(request.param) / "hf"
    torch.manual_seed(0)
    getattr(transformers, causal)(getattr(transformers, config)(**(SIZES | sizes))).save_pretrained(directory)
    vocabulary = {letter: place for place, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return directory


def vowels(completion: Any) -> float:
    return float(sum(letter in "ae" for letter in completion.text))


def jsonl(path: Path, records: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def metrics(run: Path, name: str) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record[name] for record in records if record["kind"] == "train"]


def test_a_hugging_face_model_learns_preferences_and_rewards_and_goes_back(model: Path, tmp_path: Path) -> None:
    FORMAT.import_run(model, tmp_path / "base")
    pairs = [{"prompt": f"{a}:", "chosen": f"{a}a", "rejected": f"b{b}"} for a in "abcd" for b in "efgh"]
    optimizer = {"learning_rate": 0.003, "schedule": {"warmup_steps": 0, "decay": "constant"}}
    preferred: dict[str, Any] = {
        "output": str(tmp_path / "dpo"),
        "data": {"name": "preferences", "source": jsonl(tmp_path / "pairs.jsonl", pairs), "seq_tokens": 16}
        | {"batch_size": 8, "validation_fraction": 0.0},
        "objective": {"name": "dpo"},
        "optimizer": optimizer,
        "run": {"steps": 6, "init_from": str(tmp_path / "base")},
    }
    train(parse_run(preferred))
    assert metrics(tmp_path / "dpo", "loss")[0] == pytest.approx(np.log(2), rel=1e-5)
    assert metrics(tmp_path / "dpo", "margin")[-1] > 0.1

    environment = {
        "name": "prompts",
        "source": jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{a}:"} for a in "abcd"]),
    }
    environment |= {"rewards": [f"{__name__}:vowels"], "max_tokens": 6}
    rewarded = {
        "output": str(tmp_path / "grpo"),
        "data": {"name": "rollouts", "environment": environment, "groups": 2, "group_size": 4, "seq_tokens": 16}
        | {"engine": "llm"},
        "objective": {"name": "grpo"},
        "optimizer": optimizer,
        "run": {"steps": 2, "init_from": str(tmp_path / "dpo")},
    }
    train(parse_run(rewarded))
    assert max(metrics(tmp_path / "grpo", "largest_mismatch")) < 1e-4
    assert max(metrics(tmp_path / "grpo", "grad_norm")) > 0

    FORMAT.export_run(tmp_path / "grpo", tmp_path / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert type(theirs).__name__ == FAMILIES[model.parent.name[:-1]][1]
    tokens = np.random.default_rng(0).integers(0, 9, (2, 12))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits(tmp_path / "grpo", tokens), expected, atol=1e-4, rtol=1e-4)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    assert tokenizer("c:", add_special_tokens=False)["input_ids"] == [2, 8]
    assert tokenizer.eos_token == END


def logits(run: Path, tokens: np.ndarray) -> np.ndarray:
    import jax.numpy as jnp

    from stack_train.run.config import run_config
    from stack_train.variables.weights import read_model

    opened, _ = read_model(run, run_config(run))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return np.asarray(opened.logits(opened(jnp.asarray(tokens), positions).hidden))
