"""The Language Model Evaluation Harness, and what it measures against the model in PyTorch.

It calls `stack serve` by its own command and by `stack evaluate`, which also runs it on a model in its process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ..served import KEY, Served, write_checkpoint

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
DOCUMENTS = [
    {"question": "abc", "choices": [" de", " feed a bee", " b"], "answer": 0},
    {"question": "A deaf cab", "choices": [" faced", "!", " ab\u00e7"], "answer": 1},
    {"question": "deaf", "choices": ["|", "|!", " b"], "answer": 0},  # the model's own, and two others
    {"question": "1 + 1 =", "choices": ["2", "eleven", "10"], "answer": 2},
]
UNTIL = ["\n", "b"]
MAX_TOKENS = 12
OF_BOTH = {"dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "target_delimiter": "",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": UNTIL, "max_gen_toks": MAX_TOKENS, "do_sample": False, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    write_checkpoint(directory)
    return directory


@pytest.fixture(scope="module", params=["lm_eval", "stack evaluate URL", "stack evaluate DIR"])
def samples(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, list[dict[str, Any]]]:
    """What the harness logs of each task, a document each."""
    folder = tmp_path_factory.mktemp("lm-eval")
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        settings = {"task": name, "dataset_kwargs": {"data_files": {"test": str(documents)}}, **OF_BOTH, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(settings))  # JSON is YAML
    if request.param == "stack evaluate DIR":
        run_harness("stack_core", "evaluate", directory, folder=folder)
    else:
        server = Served(directory, "--max-sequences", "4", "--step-tokens", "32", "--api-key", KEY)
        try:
            if request.param == "lm_eval":
                run_harness("lm_eval", *arguments_of(server, directory), "--log_samples", folder=folder)
            else:
                run_harness("stack_core", "evaluate", server.address, "--tokenizer", directory, folder=folder)
        finally:
            errors = server.stop()
        assert "Traceback" not in errors
    return {name: logged(folder / "results", name) for name in TASKS}


def arguments_of(server: Served, directory: Path) -> list[str]:
    model = {
        "model": server.model,
        "base_url": f"{server.address}/v1/completions",
        "tokenizer": directory,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
        "max_length": 512,
        "add_bos_token": True,
    }
    return [
        "--model",
        "local-completions",
        "--model_args",
        ",".join(f"{name}={value}" for name, value in model.items()),
    ]


def run_harness(module: str, *arguments: Any, folder: Path) -> None:
    include, output = ("--include", "--output") if module == "stack_core" else ("--include_path", "--output_path")
    command = [sys.executable, "-m", module, *map(str, arguments), "--tasks", ",".join(TASKS)]
    command += [include, str(folder), output, str(folder / "results")]
    environ = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "choices" in done.stdout and "texts" in done.stdout


def logged(results: Path, task: str) -> list[dict[str, Any]]:
    (path,) = results.rglob(f"samples_{task}_*.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(found, key=lambda sample: sample["doc_id"])


@pytest.fixture(scope="module")
def torch_model(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory)


def test_log_likelihoods_of_continuations(samples, torch_model, tokenizer):
    is_greedy = []
    for document, sample in zip(DOCUMENTS, samples["choices"], strict=True):
        expected = [likelihood(torch_model, tokenizer, document["question"], choice) for choice in document["choices"]]
        found = [(float(logprob), greedy == "True") for logprob, greedy in sample["filtered_resps"]]
        np.testing.assert_allclose([each[0] for each in found], [each[0] for each in expected], atol=TOLERANCE)
        assert [each[1] for each in found] == [each[1] for each in expected]
        is_greedy += [each[1] for each in found]
        assert sample["acc"] == (np.argmax([each[0] for each in expected]) == document["answer"])
    assert set(is_greedy) == {True, False}


def likelihood(torch_model: Any, tokenizer: Any, context: str, continuation: str) -> tuple[float, bool]:
    """The sum of the log-probabilities of a continuation's tokens, and whether each is the most likely one."""
    given, tokens = tokenizer(context).input_ids, tokenizer(context + continuation).input_ids
    with torch.no_grad():
        rows = torch.log_softmax(torch_model(torch.tensor([tokens])).logits[0, len(given) - 1 : -1], dim=-1)
    chosen = torch.tensor(tokens[len(given) :])
    return float(rows[torch.arange(len(chosen)), chosen].sum()), bool((rows.argmax(dim=-1) == chosen).all())


def test_greedy_texts_up_to_a_stop(samples, torch_model, tokenizer):
    texts = []
    for document, sample in zip(DOCUMENTS, samples["texts"], strict=True):
        prompt = tokenizer(document["question"], return_tensors="pt").input_ids
        tokens = torch_model.generate(prompt, max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=1)
        text = tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True)
        for stop in UNTIL:
            text = text.split(stop)[0]
        assert sample["filtered_resps"] == [text]
        texts.append(text)
    assert any(texts)
