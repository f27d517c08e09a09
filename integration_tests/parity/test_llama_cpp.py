"""GGUF files in llama.cpp through its Python package, which builds from source, and in transformers."""

import json
import sys
import unicodedata
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.gguf import FORMAT
from stack_train.gguf.cuts import CUTS, pre_tokenizer_of
from stack_train.gguf.representable import TEXTS
from stack_train.run.config import run_config
from stack_train.variables.weights import read_model

torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; it builds from source by pip")
sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "train" / "tests" / "gguf"))
from tiny_runs import TEMPLATE, VOCAB, make_run  # noqa: E402

TOKENS = 24
PROMPT = "the cat sat on a"
EIGHT_BITS = 0.1  # llama.cpp multiplies quantized matrices by activations of 8 bits, which layers amplify


def opened(path):
    return llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, logits_all=True, verbose=False, seed=0)


def logits_of(run, tokens):
    """Ours of every token of a sequence, float32[tokens, vocab]."""
    model, _ = read_model(run, run_config(run))
    ids = jnp.asarray([tokens], jnp.int32)
    outputs = model(ids, jnp.arange(len(tokens))[None])
    return np.asarray(model.head().logits(outputs.hidden))[0]


def answers(llama, prompt):
    """Greedy tokens of llama.cpp after a prompt, and its logits before each of them."""
    ids, found = list(prompt), []
    llama.reset()
    llama.eval(ids)
    for _ in range(TOKENS):
        logits = np.array(llama.scores[len(ids) - 1])
        found.append(logits)
        ids.append(int(logits.argmax()))
        llama.eval(ids[-1:])
    return ids, np.stack(found)


def check(ours, theirs, *, most):
    """Logits agree, and so do the greedy tokens that lead by more than quantization moves logits.

    Args:
      most: root mean square of the differences, and the lead of a token that must be the same, as shares of the logits'
        standard deviation.
    """
    deviation, difference = ours.std(), ours - theirs
    assert deviation > 0.1 and np.sqrt(np.mean(difference**2)) < most * deviation, difference
    top = np.sort(ours, axis=-1)
    clear = top[:, -1] - top[:, -2] > most * deviation
    assert clear.mean() > 0.4
    np.testing.assert_array_equal(ours.argmax(-1)[clear], theirs.argmax(-1)[clear])


def dequantized_logits(directory, file, tokens):
    """Those of transformers, which dequantizes a file with the format's own package and multiplies in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, gguf_file=file, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(torch.tensor([tokens])).logits[0].numpy()


FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "tie_embeddings": True},
    "mixtral": {"experts": 4},
    "qwen3_moe": {"head_dim": 32, "experts": 4, "active_experts": 2, "expert_mlp": 64},
    "gemma3": {"layers": 7, "window": 8, "query_scalar": 16},
}


@pytest.mark.parametrize("stored", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_ours_answers_there_as_the_same_weights_do_here(tmp_path, family, stored):
    make_run(tmp_path / "run", family, initializer_std=0.125, **FAMILIES[family])
    FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf", stored=stored)
    FORMAT.import_run(tmp_path / "model.gguf", tmp_path / "stored")  # what the file's numbers stand for
    llama = opened(tmp_path / "model.gguf")
    prompt = llama.tokenize(PROMPT.encode())
    ids, theirs = answers(llama, prompt)
    ours = logits_of(tmp_path / "stored", ids)[len(prompt) - 1 : -1]
    check(ours, theirs, most=0.01 if stored == "F16" else EIGHT_BITS)


def test_the_tokenizer_and_the_chat_template_are_in_the_file(tmp_path):
    make_run(tmp_path / "run")
    FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf")
    llama = opened(tmp_path / "model.gguf")
    tokenizer = HuggingFaceTokenizer.load(tmp_path / "run" / "tokenizer")
    for text in (PROMPT, "it's 1234 o'clock,  isn't it?", "naïve café", "日本語"):
        assert llama.tokenize(text.encode()) == tokenizer.encode(text)
        assert llama.detokenize(llama.tokenize(text.encode(), add_bos=False)).decode() == text
    assert llama.metadata["tokenizer.chat_template"] == TEMPLATE
    assert (llama.token_bos(), llama.token_eos()) == (tokenizer.bos_id, tokenizer.eos_id)
    assert llama.n_vocab() == VOCAB


CUTS_OF_2025 = (
    "gpt-2 olmo smollm command-r llama-bpe smaug-bpe qwen2 hunyuan tekken gpt-4o deepseek-v3 deepseek-llm "
    "deepseek-coder falcon default bloom viking chameleon kimi-k2 bailingmoe seed-coder"
)


@pytest.mark.filterwarnings("ignore:The tokenizer composes characters first")
@pytest.mark.parametrize("name", CUTS_OF_2025.split())
def test_texts_are_cut_there_as_here(tmp_path, name):
    cut = CUTS[name]
    make_run(tmp_path / "run")
    path = tmp_path / "run" / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["pre_tokenizer"] = pre_tokenizer_of(cut)
    content["normalizer"] = {"type": "NFC"} if cut.composes else None
    content["model"]["ignore_merges"] = cut.ignores_merges
    path.write_text(json.dumps(content))
    FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf")
    llama = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    assert llama.metadata["tokenizer.ggml.pre"] == name
    tokenizer = HuggingFaceTokenizer.load(tmp_path / "run" / "tokenizer")
    for text in (unicodedata.normalize("NFC", text) for text in TEXTS):  # llama.cpp does not compose
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        assert ids == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "Q4_0"])
def test_a_file_that_llama_cpp_quantized_opens_here(tmp_path, kind):
    make_run(tmp_path / "run", "qwen2", embed=256, mlp=256, initializer_std=0.0625)
    FORMAT.export_run(tmp_path / "run", tmp_path / "plain.gguf")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = {"Q4_0": 2, "Q8_0": 7, "Q4_K": 14, "Q6_K": 18}[kind]
    params.nthread = 1
    done = llama_cpp.llama_model_quantize(
        str(tmp_path / "plain.gguf").encode(), str(tmp_path / "model.gguf").encode(), params
    )
    assert done == 0
    FORMAT.import_run(tmp_path / "model.gguf", tmp_path / "again")
    llama = opened(tmp_path / "model.gguf")
    prompt = llama.tokenize(PROMPT.encode())
    ids, theirs = answers(llama, prompt)
    ours = logits_of(tmp_path / "again", ids)
    check(ours[len(prompt) - 1 : -1], theirs, most=EIGHT_BITS)
    np.testing.assert_allclose(ours, dequantized_logits(tmp_path, "model.gguf", ids), atol=1e-5, rtol=1e-5)
