"""An encoder-decoder that learns from pairs, from the files of text to answers to new texts."""

import dataclasses
import itertools
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import stack_train
from stack_core.abi.errors import GenerationError
from stack_core.cli import main
from stack_train.huggingface import FORMAT
from stack_train.run.resolve import parse_run
from stack_train.run.train import train

LETTERS = "abcde"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of letters, whose texts end with an end token as those of T5 do, and pairs of reversed words."""
    root = tmp_path_factory.mktemp("reversed")
    vocabulary = {name: index for index, name in enumerate(["<pad>", "</s>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    (root / "tokenizer").mkdir()
    tokenizer.save(str(root / "tokenizer" / "tokenizer.json"))
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "<pad>"}))
    words = ["".join(each) for count in (1, 2, 3, 4) for each in itertools.product(LETTERS, repeat=count)]
    # Every seventh word is held out of training, and half of these are tried.
    (root / "new.json").write_text(json.dumps(words[::14]))
    records = [{"source": word, "target": word[::-1]} for place, word in enumerate(words) if place % 7]
    (root / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return root


def config_of(root, output, steps, **sections):
    model = {"name": "t5", "vocab_size": 7, "embed": 32, "layers": 1, "heads": 4, "head_dim": 16, "mlp": 64}
    model |= {"buckets": 8, "max_distance": 16, "max_positions": 40, "dtype": "float32"}
    data = {"name": "pairs", "source": str(root / "pairs.jsonl"), "tokenizer": str(root / "tokenizer")}
    data |= {"source_tokens": 40, "target_tokens": 40, "batch_size": 16, "validation_fraction": 0.02}
    optimizer = {"learning_rate": 0.01, "schedule": {"warmup_steps": 20}}
    base = {"model": model, "data": data, "optimizer": optimizer, "run": {"steps": steps}}
    return parse_run({**base, "output": str(root / output), **sections})


@pytest.fixture(scope="module")
def run(folder):
    train(config_of(folder, "run", 300))
    return folder / "run"


def test_it_reverses_new_words(run, folder, capsys):
    words = json.loads((folder / "new.json").read_text())
    model = stack_train.load(run)
    answers = {word: model.generate(word, temperature=0.0, max_tokens=8) for word in words}
    right = [word for word, answer in answers.items() if answer.text == word[::-1]]
    assert len(right) >= 0.95 * len(words), {word: str(answer) for word, answer in answers.items()}
    assert {answers[word].finish_reason for word in right} == {"end_token"}
    main(["generate", str(run), "--prompt", right[-1], "--temperature", "0"])
    assert capsys.readouterr().out == right[-1][::-1] + "\n"
    drawn = {str(model.generate("abcd", temperature=5.0, seed=seed, max_tokens=8)) for seed in range(6)}
    assert len(drawn) > 2
    assert model.generate("abcd", temperature=5.0, seed=1, max_tokens=8) == model.generate(
        "abcd", temperature=5.0, seed=1, max_tokens=8
    )


def test_the_run_goes_to_hugging_face_and_trains_on(run, folder):
    FORMAT.export_run(run, folder / "hf")
    assert json.loads((folder / "hf" / "config.json").read_text())["decoder_start_token_id"] == 0
    word = "abcd"
    expected = stack_train.load(run).generate(word, temperature=0.0, max_tokens=8)
    assert stack_train.load(f"hf:{folder}/hf").generate(word, temperature=0.0, max_tokens=8) == expected
    data = {"name": "pairs", "source": str(folder / "pairs.jsonl"), "source_tokens": 16, "target_tokens": 16}
    data |= {"batch_size": 2, "validation_fraction": 0.0}
    again = {"output": str(folder / "again"), "run": {"steps": 1, "init_from": f"hf:{folder}/hf"}, "data": data}
    train(parse_run({**again, "optimizer": {"learning_rate": 1e-6}}))
    assert stack_train.load(folder / "again").generate(word, temperature=0.0, max_tokens=8) == expected


def test_sources_and_targets_have_limits(run):
    model = stack_train.load(run)
    with pytest.raises(GenerationError, match="The source is 41 tokens long; the model has max_positions=40"):
        model.generate("a" * 40)
    # Without end tokens, only the positions limit a target; its start token takes one.
    endless = stack_train.LoadedModel(model.address, dataclasses.replace(model.checkpoint, end_tokens=frozenset()))
    found = endless.generate("a" * 39, temperature=0.0, max_tokens=1000)
    assert (found.finish_reason, len(found.tokens)) == ("max_positions", 39)
