"""GRPO with an agent that asks the policy through the openai client, as docs/rl.md shows it."""

import json
import re
from pathlib import Path

import pytest
import yaml

from stack_core.abi.config import apply_overrides, parse
from stack_train.run.config import RunConfig
from stack_train.run.train import train

PAGE = Path(__file__).parents[1] / "docs" / "rl.md"
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MODEL = {"name": "llama", "vocab_size": 280, "layers": 1, "embed": 32, "heads": 2, "mlp": 48, "dtype": "float32"}


def block(language: str) -> str:
    """The page's block of a language about agents."""
    (found,) = (
        text for text in re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL) if "agent" in text
    )
    return found


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has seen two conversations, with its tokenizer and template."""
    root = tmp_path_factory.mktemp("chat")
    (root / "text.txt").write_text("user: red or blue? assistant: red. user: up or down? assistant: up. " * 40)
    (root / "template.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "say red"}, {"role": "assistant", "content": "red"}]
    (root / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    text = {"source": f"text:{root}/*.txt", "vocab_size": 280, "seq_tokens": 32, "validation_fraction": 0.0}
    train(run(root / "text", model=MODEL, data=text | {"batch_size": 4}, run={"steps": 1}))
    data = {"name": "chat", "source": f"{root}/chat.jsonl", "chat_template": f"{root}/template.jinja"}
    sizes = {"seq_tokens": 48, "batch_size": 1, "validation_fraction": 0.0}
    train(run(root / "run", model=MODEL, data=data | sizes, run={"steps": 1, "init_from": f"{root}/text"}))
    return root / "run"


def run(output: Path, **sections) -> RunConfig:
    return parse(RunConfig, apply_overrides({**sections, "output": str(output)}, []))


@pytest.mark.parametrize("engine", ["static", pytest.param("llm", marks=pytest.mark.slow)])
def test_grpo_trains_an_agent_of_two_turns(chat, tmp_path, monkeypatch, engine):
    (tmp_path / "shorten.py").write_text(block("python"))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {each}"}) + "\n" for each in "abc"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    recipe = yaml.safe_load(block("yaml"))
    recipe["data"] |= {"groups": 2, "group_size": 4, "engine": engine}
    recipe["data"]["environment"]["max_tokens"] = 8
    settings = {**recipe.pop("run"), "steps": 2, "init_from": str(chat)}
    output = tmp_path / recipe.pop("output")
    train(run(output, **recipe, model=MODEL, run=settings))

    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    steps = [each for each in lines if each["kind"] == "train"]
    assert [each["step"] for each in steps] == [1, 2]
    for each in steps:
        assert each["dropped"] == 0 and 2 <= each["action_tokens"] <= 16
        assert 0 < each["largest_mismatch"] < 1e-4  # what was kept of two requests is what the trainer computes
    assert any(each["reward"] != 0 and each["grad_norm"] > 0 for each in steps)
