"""lm-evaluation-harness, with its two models of OpenAI's endpoints, on a task whose answers are known."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..forced import write_forced_checkpoint
from ..served import KEY, Served

pytestmark = pytest.mark.clients("lm_eval")

# The model continues "<|assistant|>" by "Let me" and "Let me" by " see."; the last answer is expected to be wrong.
CHOICES = [
    {"text": "<|user|>Hello<|assistant|>", "choices": ["Let me", "It is"], "answer": 0},
    {"text": "<|assistant|>Let me", "choices": [" 42.", " see.\n"], "answer": 1},
    {"text": "<|user|>a longer question<|assistant|>", "choices": ["Let me see.\n", "It is 42."], "answer": 1},
]
QUESTIONS = [{"text": "17 + 25?", "answer": "Let me see."}, {"text": "Hello", "answer": "It is 42."}]
CHOICE_TASK = """
task: forced_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
ANSWER_TASK = """
task: forced_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<tool_call>"], max_gen_toks: 3, temperature: 0}}
filter_list: [{{name: stripped, filter: [{{function: regex, regex_pattern: "(.*)"}}, {{function: take_first}}]}}]
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.parametrize(
    ("model", "endpoint", "task", "documents", "metric", "expected"),
    [
        ("local-completions", "completions", CHOICE_TASK, CHOICES, "acc,none", 2 / 3),
        ("local-chat-completions", "chat/completions", ANSWER_TASK, QUESTIONS, "exact_match,stripped", 1 / 2),
    ],
)
def test_results_are_the_known_ones(
    model: str, endpoint: str, task: str, documents: list[Any], metric: str, expected: float, tmp_path: Path
) -> None:
    directory, tasks = tmp_path / "forced-llama", tmp_path / "tasks"
    directory.mkdir(), tasks.mkdir()
    write_forced_checkpoint(directory)
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (tasks / "forced.yaml").write_text(task.format(data=data))
    served = Served(directory, "--max-sequences", "2", "--step-tokens", "64")
    arguments = f"model={served.model},base_url={served.address}/v1/{endpoint},num_concurrent=2,max_retries=1"
    if endpoint == "completions":
        arguments += f",tokenizer_backend=huggingface,tokenizer={directory},tokenized_requests=True"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
    command += ["--tasks", task.split()[1], "--include_path", str(tasks), "--output_path", str(tmp_path / "results")]
    command += ["--apply_chat_template"] * (endpoint != "completions")
    environ = {**os.environ, "OPENAI_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    errors = served.stop()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = (tmp_path / "results").rglob("results_*.json")
    assert json.loads(results.read_text())["results"][task.split()[1]][metric] == pytest.approx(expected)
    assert "Traceback" not in errors
