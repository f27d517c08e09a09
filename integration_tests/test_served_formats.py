"""`stack serve` and `stack chat` of a GGUF file: the model, the tokenizer and the answer of the run made of it."""

import asyncio
from pathlib import Path
from typing import Any

import gguf
import httpx2
import jax
import numpy as np
import pytest

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import SamplingParams
from stack_core.abi.model_formats import open_for_generation
from stack_core.cli import main
from stack_core.text.chat_template import ChatTemplate
from stack_serve.http import server
from stack_serve.llm.language_model import LLM
from stack_serve.openai.lifecycle import OpenAIApp
from stack_train.generation.generate import TokenGenerator
from stack_train.generation.sampling import SamplingConfig

from .served import write_checkpoint

MESSAGES = [{"role": "user", "content": "the cat sat"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.gguf and run/, made of it."""
    root = tmp_path_factory.mktemp("formats")
    (root / "hf").mkdir()
    write_checkpoint(root / "hf")
    main(["convert", f"hf:{root / 'hf'}", str(root / "start")])
    main(["convert", str(root / "start"), f"gguf:{root / 'model.gguf'}"])
    main(["convert", f"gguf:{root / 'model.gguf'}", str(root / "run")])
    return root


@pytest.mark.parametrize("scheme", ["gguf:", ""])
def test_a_file_is_opened_as_its_run(root: Path, scheme: str) -> None:
    ours, run = open_for_generation(f"{scheme}{root / 'model.gguf'}"), open_for_generation(str(root / "run"))
    assert ours.tokenizer is not None and run.tokenizer is not None
    assert list(ours.tokenizer.encode("the cat sat")) == list(run.tokenizer.encode("the cat sat"))
    for name in ("chat_template", "special_tokens", "end_tokens", "max_positions", "sampling_defaults"):
        assert getattr(ours, name) == getattr(run, name), name
    assert ours.chat_template is not None
    jax.tree.map(np.testing.assert_array_equal, ours.load_params(), run.load_params())


# A type for each matrix that `gguf` can quantize to; the type of the embedding depends on the test.
TYPES = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "attn_output": "Q5_1", "ffn_gate": "Q8_0"}


def write_quantized(source: Path, target: Path, *, tied: bool) -> None:
    """Copies a file with quantized matrices; `tied` leaves out the head."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if field.types[1:] else None)
    for each in reader.tensors:
        if len(each.shape) == 1:
            writer.add_tensor(each.name, np.asarray(each.data))
        elif not (tied and each.name == "output.weight"):
            place = each.name.removesuffix(".weight").split(".")[-1]
            kind = gguf.GGMLQuantizationType[TYPES.get(place, "Q4_0" if tied else "Q4_1")]
            values = gguf.quants.dequantize(each.data, each.tensor_type)
            # Larger weights than at the start of a training, which decide tokens clearly.
            writer.add_tensor(each.name, gguf.quants.quantize(3 * values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_quantized_weights_generate_as_the_same_weights_in_floats(root: Path, tmp_path: Path, tied: bool) -> None:
    write_quantized(root / "model.gguf", tmp_path / "model.gguf", tied=tied)
    sizes = {"max_sequences": 1, "max_tokens": 32, "step_tokens": 16, "decode_repeats": 2, "prefix_caching": False}
    sampling = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
    found = []
    for dequantize in (False, True):
        with LLM(f"gguf:{tmp_path / 'model.gguf'}", dequantize=dequantize, **sizes) as llm:
            found.append([output.outputs[0] for output in llm.generate(["the cat sat"], sampling)])
            weights_bytes = llm._engine._programs.sizes_bytes()["parameters"]
        assert (weights_bytes < 60_000) == (not dequantize)
    for ours, floats in zip(*found, strict=True):
        assert ours.token_ids == floats.token_ids and len(set(ours.token_ids)) > 1
        assert ours.logprobs is not None and floats.logprobs is not None
        logprobs = [[each.logprob for each in output.logprobs] for output in (ours, floats)]
        np.testing.assert_allclose(*logprobs, rtol=0, atol=1e-4)


def test_floats_are_not_read_in_another_form(root: Path) -> None:
    for address in (f"gguf:{root / 'model.gguf'}", str(root / "run")):
        with pytest.raises(GenerationError, match="not read in another form: dequantize is for GGUF files"):
            LLM(address, dequantize=True)


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [False, True])
def test_a_served_file_answers_as_its_run(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantized: bool
) -> None:
    if quantized:
        write_quantized(root / "model.gguf", tmp_path / "model.gguf", tied=True)
        main(["convert", f"gguf:{tmp_path / 'model.gguf'}", str(tmp_path / "run")])
        root = tmp_path
    answers: list[str] = []

    class InProcess:
        def __init__(self, app: OpenAIApp, listener: Any, config: Any, **others: Any) -> None:
            self.app = app

        def run(self) -> None:
            engine = self.app.make_engine()
            engine.start()  # without a warm-up, which would compile programs that one request does not use
            try:
                answers.append(asyncio.run(self._answer(engine)))
            finally:
                engine.close()

        async def _answer(self, engine: Any) -> str:
            self.app.service.serve(engine)
            body = {"model": "model", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
            transport = httpx2.ASGITransport(self.app.asgi)
            async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as client:
                answer = (await client.post("/v1/chat/completions", json=body)).json()
            return answer["choices"][0]["message"]["content"]

    monkeypatch.setattr(server, "HttpServer", InProcess)
    before = sorted(root.iterdir())
    sizes = ["--max-sequences", "1", "--max-tokens", "64", "--step-tokens", "16", "--decode-repeats", "1"]
    main(["serve", f"gguf:{root / 'model.gguf'}", "--port", "0", *sizes])
    assert sorted(root.iterdir()) == before
    run = open_for_generation(str(root / "run"))
    assert run.chat_template is not None and run.tokenizer is not None
    text = ChatTemplate(run.chat_template, run.special_tokens).render(MESSAGES)
    prompt = list(run.tokenizer.encode(text, add_special_tokens=False))
    expected = list(TokenGenerator(run).stream(prompt, SamplingConfig(temperature=0.0, max_tokens=12)))
    assert answers == [run.tokenizer.decode(expected)] and len(answers[0]) > 4


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_bad_file_is_explained(root: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = (root / "model.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[:-100])
    (tmp_path / "other.gguf").write_bytes(content.replace(b"llama", b"bloom"))
    for name, message in (
        ("none.gguf", "none.gguf: the file does not exist. Give the path of a file"),
        ("", f"is a directory. Give the path of a file, such as gguf:{tmp_path / 'cut.gguf'}"),
        ("cut.gguf", "cut.gguf is not a complete GGUF file"),
        ("other.gguf", "is of architecture 'bloom'; these are read: "),
    ):
        with pytest.raises(SystemExit):
            main([command, f"gguf:{tmp_path / name}", *(["--port", "0"] if command == "serve" else [])])
        assert message in " ".join(capsys.readouterr().err.split())
