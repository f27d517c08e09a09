import dataclasses
import html
import io
import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from stack_core.abi.config import to_yaml
from stack_core.abi.errors import GenerationError
from stack_core.abi.run_directory import RunDirectory
from stack_core.cli import main
from stack_core.ops.kv_cache import DenseKVCache
from stack_train.checkpoint import CheckpointStore, named_leaves
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.generation.generate import TextGenerator, TokenGenerator
from stack_train.generation.generative import generative_checkpoint
from stack_train.generation.sampling import SamplingConfig
from stack_train.models.llama import FAMILY, LlamaConfig
from stack_train.run.config import RunConfig
from stack_train.variables.trained_model import RUN_FORMAT

from ..random_models import draw_model

CONFIG = LlamaConfig(
    vocab_size=260,
    embed=24,
    layers=2,
    heads=4,
    kv_heads=2,
    mlp=40,
    max_positions=40,
    dtype="float32",
)
GREEDY = SamplingConfig(temperature=0, max_tokens=8)
PROMPT = "Grüße"


@pytest.fixture(scope="module")
def model():
    return draw_model(lambda: FAMILY.build(CONFIG, key=jax.random.key(0)), scale=0.3)


def opened(model, directory="nowhere"):
    return generative_checkpoint(
        model, CONFIG, name="tiny", tokenizer=Path(directory, "tokenizer"), origin=Path(directory)
    )


@pytest.fixture(scope="module")
def tokens(model):
    return TokenGenerator(opened(model))


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run directory as training and conversion leave it."""
    directory = RunDirectory(tmp_path_factory.mktemp("runs") / "run")
    directory.tokenizer.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(directory.tokenizer / "tokenizer.json"))
    (directory.tokenizer / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    config_yaml = to_yaml(RunConfig(output=str(directory.path), model=CONFIG))
    directory.config.write_text(config_yaml)
    with CheckpointStore(directory.checkpoints) as store:
        store.save_weights(named_leaves(nnx.to_pure_dict(nnx.state(model))).items(), config_yaml)
    return directory.path


@pytest.fixture(scope="module")
def generator(run):
    return TextGenerator(RUN_FORMAT.open_for_generation(run))


@pytest.fixture(scope="module")
def next_token(model):
    """Predicts the next token of a sequence without a cache, in one program for all lengths."""

    @jax.jit
    def compute(tokens, last):
        hidden = model(tokens, jnp.arange(CONFIG.max_positions)[None]).hidden
        return jnp.argmax(model.logits(hidden[0, last]))

    def predict(sequence):
        padded = jnp.array([sequence + [0] * (CONFIG.max_positions - len(sequence))])
        return int(compute(padded, len(sequence) - 1))

    return predict


@pytest.mark.parametrize("length", [1, 5, 16, 17])
def test_greedy_is_what_the_whole_sequence_gives(next_token, tokens, length):
    sequence = list(range(3, 3 + length))
    found = list(tokens.stream(sequence, GREEDY))
    for _ in range(8):
        sequence.append(next_token(sequence))
    assert found == sequence[length:]


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
def test_keys_and_values_may_be_held_as_codes(model, kind):
    prompt = [7, 8, 9, 10]
    cache, expected, tokens = DenseKVCache.empty(model.states, batch=1, capacity=16, storage=kind), [], prompt

    @jax.jit
    def step(tokens, cache):
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        outputs = model(tokens, positions, cache=cache)
        return jnp.argmax(model.logits(outputs.hidden[0, -1])), outputs.cache

    for _ in range(8):
        token, cache = step(jnp.array([tokens]), cache)
        tokens = [int(token)]
        expected += tokens
    assert list(TokenGenerator(opened(model), kind).stream(prompt, GREEDY)) == expected


def test_the_command_holds_them_as_codes(run, capsys):
    arguments = ["generate", str(run), "--prompt", PROMPT, "--max-tokens", "5", "--temperature", "0", "--json"]
    main([*arguments, "--kv-cache", "int8"])
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 5


def test_seed_decides_the_draws(tokens):
    def drawn(seed):
        return list(tokens.stream([5, 6], SamplingConfig(seed=seed, max_tokens=10)))

    assert drawn(0) == drawn(0) != drawn(1)
    assert len(set(drawn(0))) > 1


def test_no_setting_compiles_anything_anew(model):
    generator = TokenGenerator(opened(model))
    for settings in ({"temperature": 0}, {"temperature": 0.7, "top_k": 5}, {"top_p": 0.5}, {"max_tokens": 9}):
        list(generator.stream([1, 2, 3], SamplingConfig(**{"max_tokens": 12, **settings})))
    assert generator._prefill._cache_size() == generator._decode._cache_size() == 1


def test_bfloat16_decodes_what_the_whole_sequence_gives():
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    model = draw_model(lambda: FAMILY.build(config, key=jax.random.key(0)), scale=0.3)
    tokens = list(TokenGenerator(opened(model)).stream([5, 6, 7], GREEDY))
    sequence = jnp.array([[5, 6, 7, *tokens]])
    positions = jnp.arange(sequence.shape[1])[None]
    logits = jax.jit(lambda tokens: model.logits(model(tokens, positions).hidden))(sequence)[0, 2:-1]
    # The chosen token's logit is the largest but for rounding: products of other shapes are summed in other orders.
    assert (logits.max(-1) - logits[jnp.arange(len(tokens)), jnp.array(tokens)] < 0.05).all()


def test_generation_ends_where_positions_do(generator):
    prompt = "x" * 35
    result = generator.generate(prompt, dataclasses.replace(GREEDY, max_tokens=100))
    assert (result.prompt_tokens, result.finish_reason) == (35, "max_positions")
    assert len(result.tokens) == 5
    assert generator.generate("x" * 39, GREEDY).finish_reason == "max_positions"
    assert generator.generate("x" * 32, GREEDY).finish_reason == "max_tokens"


@pytest.mark.parametrize("length", [40, 41, 300])
def test_a_prompt_without_a_position_to_spare_is_refused(generator, length):
    with pytest.raises(GenerationError, match=rf"{length} tokens long.*max_positions=40.*39 tokens"):
        generator.generate("x" * length, GREEDY)


def test_an_empty_prompt_is_refused(generator):
    with pytest.raises(GenerationError, match="no tokens"):
        generator.generate("", GREEDY)


def test_streamed_text_is_the_text_of_the_tokens(run, generator):
    pieces = []
    result = generator.generate(PROMPT, SamplingConfig(max_tokens=30, seed=1), write=pieces.append)
    tokenizer = HuggingFaceTokenizer.load(run / "tokenizer")
    assert "".join(pieces) == result.text == tokenizer.decode(result.tokens)
    assert len(pieces) > 1
    # HTML has no control characters; the replacement character stands for them.
    shown, text = (re.sub(r"[\x00-\x1f\x7f-\x9f\ufffd]", "", each) for each in (result._repr_html_(), result.text))
    assert f"{html.escape(text)}</pre>" in shown


def test_an_end_token_ends_and_is_left_out(run, model):
    checkpoint = opened(model, run)
    full = TextGenerator(checkpoint).generate(PROMPT, GREEDY)
    end = full.tokens[3]
    cut = TextGenerator(dataclasses.replace(checkpoint, end_tokens=frozenset({end}))).generate(PROMPT, GREEDY)
    assert cut.finish_reason == "end_token"
    assert cut.tokens == full.tokens[: full.tokens.index(end) + 1]
    assert cut.text == checkpoint.tokenizer.decode(cut.tokens[:-1])


def test_a_stop_text_across_tokens_cuts_the_text(generator):
    sampling = SamplingConfig(max_tokens=30, seed=1)
    text = generator.generate(PROMPT, sampling).text
    stop = text[5:8]
    result = generator.generate(PROMPT, dataclasses.replace(sampling, stop=(stop,)))
    assert result.finish_reason == "stop"
    assert result.text == text[: text.index(stop)]


def test_a_checkpoint_without_a_tokenizer_is_refused(model):
    with pytest.raises(GenerationError, match=r"tiny has no tokenizer.*tokenizer\.json"):
        TextGenerator(opened(model))


def test_command_streams_and_prints_json(run, generator, capsys, monkeypatch):
    arguments = ["generate", str(run), "--max-tokens", "8", "--temperature", "0"]
    expected = generator.generate(PROMPT, GREEDY)
    main([*arguments, "--prompt", PROMPT])
    assert capsys.readouterr().out == expected.text + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    main([*arguments, "--prompt", "-", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["prompt_tokens"] == 7
    assert result["text"] == expected.text
    assert result["finish_reason"] == "max_tokens"
    assert np.array_equal(result["tokens"], expected.tokens)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--top-p", "2"], "top_p"),
        (["--prompt", "x" * 50], "max_positions=40"),
        ([], "prompt"),
    ],
)
def test_command_refuses_with_status_2(run, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["generate", str(run), *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.lower()


def test_command_without_a_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["generate", str(tmp_path / "nothing"), "--prompt", "x"])
    assert caught.value.code == 2
    assert "nothing is not a directory" in capsys.readouterr().err
