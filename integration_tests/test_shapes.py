"""The example of pictures: a model with images is trained, and served through the openai client."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from PIL import Image

from stack_core.abi.config import load_yaml, parse
from stack_core.abi.errors import StackError
from stack_core.abi.generation import SamplingParams
from stack_core.cli import main
from stack_serve.llm.language_model import LLM
from stack_train.checkpoint import named_leaves
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program

ROOT = Path(__file__).parents[1]
PORT = 18_431


def questions(directory):
    """Yields each held-out question with a data URL of its picture, and the answer."""
    for line in (directory / "held_out.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        path = messages[0]["content"][0]["image_url"]["url"]
        url = f"data:image/png;base64,{base64.b64encode((directory / path).read_bytes()).decode()}"
        for asked, answer in zip(messages[::2], messages[1::2], strict=True):
            parts = [{"type": "image_url", "image_url": {"url": url}}, asked["content"][-1]]
            yield [{"role": "user", "content": parts}], answer["content"]


GRID_MODEL = {
    "name": "qwen3_vl",
    "vocab_size": 24,
    "embed": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "rope_sections": [4, 2, 2],
    "mlp": 128,
    "max_positions": 64,
    "dtype": "float32",
    "initializer_std": 0.08,
    "image_token": 2,
    "min_pixels": 1024,
    "max_pixels": 1536,
    "vision": {"embed": 64, "heads": 4, "mlp": 128, "layers": 2, "patch": 4, "position_side": 8, "deepstack": [0]},
}
WINDOWED_MODEL = {
    **{key: value for key, value in GRID_MODEL.items() if key != "head_dim"},
    "name": "qwen2_5_vl",
    "vision": {"embed": 64, "heads": 4, "mlp": 128, "layers": 2, "patch": 4, "window": 16, "full_layers": [1]},
}


def widen(picture):
    """Adds half as many columns to a picture, some of them on its left."""
    number = int(picture.stem)
    with Image.open(picture) as image:
        wide = Image.new("RGB", (3 * image.width // 2, image.height), (20, 20, 20))
        wide.paste(image, (number % 17, 0))
    wide.save(picture)


@pytest.mark.slow  # minutes: it trains a model
@pytest.mark.parametrize("model", [None, GRID_MODEL, WINDOWED_MODEL], ids=["gemma3_vision", "qwen3_vl", "qwen2_5_vl"])
def test_a_model_learns_shapes_and_colors_and_is_served_with_the_same_answers(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, ROOT / "examples" / "shapes.py"], check=True)
    if model is not None:  # pictures of two sizes
        for picture in Path("runs/shapes-data/pictures").glob("*[0147].png"):
            widen(picture)
    config = load_yaml(ROOT / "examples" / "shapes.yaml")
    Path("shapes.yaml").write_text(json.dumps(config if model is None else {**config, "model": model}))
    main(["train", "shapes.yaml"])
    found = list(questions(tmp_path / "runs" / "shapes-data"))
    assert len(found) >= 400
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    with LLM("runs/shapes", max_sequences=8, step_tokens=64) as llm:
        outputs = llm.chat([messages for messages, _ in found], greedy)
    answers = [output.text for output in outputs]
    image_token = 3 if model is None else 2
    assert {output.prompt_token_ids.count(image_token) for output in outputs} == ({16} if model is None else {16, 24})
    right = sum(given.strip() == answer for given, (_, answer) in zip(answers, found, strict=True))
    assert right >= 0.95 * len(found), f"{right} of {len(found)} held-out questions"
    command = [sys.executable, "-m", "stack_core", "serve", "runs/shapes", "--port", str(PORT), "--json"]
    with subprocess.Popen([*command, "--max-sequences", "8", "--step-tokens", "64"], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline()  # when it is ready
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0)
            for (messages, _), answer in list(zip(found, answers, strict=True))[:60]:
                served = client.chat.completions.create(
                    model=client.models.list().data[0].id, messages=messages, temperature=0, max_tokens=3
                )
                assert served.choices[0].message.content == answer
        finally:
            server.terminate()


@pytest.mark.parametrize(("model", "groups"), [(GRID_MODEL, 2), (WINDOWED_MODEL, 1)], ids=["qwen3_vl", "qwen2_5_vl"])
def test_a_rule_for_adapters_names_the_decoder_or_the_tower(model, groups):
    data = {"name": "image_chat", "source": "chats.jsonl", "tokenizer": "tokenizer", "seq_tokens": 32, "batch_size": 2}

    def adapted(path):
        mapping = {"output": "none", "model": model, "data": data, "lora": {"rules": [{"path": path}]}}
        trained = named_leaves(build_program(parse(RunConfig, mapping)).step.model.variables.trained)
        return {name.removeprefix("lora/").rpartition("/")[0] for name in trained}

    assert len(adapted("blocks")) == 7 * groups
    assert adapted("query/kernel") == {f"blocks/0/{place}/attention/query/kernel" for place in range(groups)}
    assert {path.partition("/")[0] for path in adapted("vision/.*(query|value)/kernel")} == {"vision"}
    with pytest.raises(StackError, match="path='patches', matches no parameter"):
        adapted("patches")
