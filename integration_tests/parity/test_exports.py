"""A run of ours, exported: transformers finds its special tokens, its generation config and its chat template."""

import json
from pathlib import Path

import pytest
import transformers

from stack_core.abi.config import parse
from stack_core.text.chat_template import ChatTemplate
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.huggingface import FORMAT
from stack_train.run.config import RunConfig
from stack_train.run.train import train

pytestmark = pytest.mark.parity

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
TALK = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]


def test_transformers_opens_all_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("one two three four, one two three. " * 20)
    config = {
        "output": str(tmp_path / "run"),
        "model": {"name": "llama", "vocab_size": 264, "layers": 1, "embed": 8, "heads": 2, "mlp": 16},
        "data": {"source": f"text:{tmp_path}/*.txt", "seq_tokens": 8, "batch_size": 1, "validation_fraction": 0.0},
        "run": {"steps": 1},
    }
    train(parse(RunConfig, config))
    (tmp_path / "run" / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    FORMAT.export_run(tmp_path / "run", tmp_path / "hf")

    ours = HuggingFaceTokenizer.load(tmp_path / "run" / "tokenizer")
    special = {"bos_token_id": ours.bos_id, "eos_token_id": ours.eos_id, "pad_token_id": ours.pad_id}
    assert None not in special.values()
    model_config = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for opened in (model_config, generation, tokenizer):
        assert {name: getattr(opened, name) for name in special} == special, type(opened).__name__
    rendered = ChatTemplate(TEMPLATE, ours.special_tokens).render(TALK, add_generation_prompt=False)
    assert tokenizer.apply_chat_template(TALK, tokenize=False) == rendered
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == ours.encode(rendered, add_special_tokens=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.generation_config.eos_token_id == ours.eos_id
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
