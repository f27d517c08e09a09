"""Encoder-decoders with adapters, quantized, exported, and where they are refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import stack_train
from stack_core.abi.errors import GenerationError
from stack_core.cli import main
from stack_core.ops.building import is_quantized
from stack_serve import LLM
from stack_train.run.resolve import parse_run
from stack_train.run.train import train

from .test_post_training import losses

GREEDY = {"temperature": 0.0, "max_tokens": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base run, and pairs of a word and its first letter."""
    root = tmp_path_factory.mktemp("pairs")
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(["<pad>", "</s>", *"abcd"])}, "<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    (root / "tokenizer").mkdir()
    tokenizer.save(str(root / "tokenizer" / "tokenizer.json"))
    (root / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcd"), 3)) for _ in range(48)]
    records = [{"source": word, "target": word[0]} for word in words]
    (root / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    train(parse_run(config_of(root, "base", 2)))
    return root


def config_of(root: Path, output: str, steps: int, **sections: object) -> dict:
    model = {"name": "t5", "vocab_size": 6, "embed": 32, "layers": 2, "heads": 2, "head_dim": 16, "mlp": 64}
    model |= {"buckets": 8, "max_distance": 16, "max_positions": 16, "dtype": "float32", "feed_forward": "gated-gelu"}
    data = {"name": "pairs", "source": str(root / "pairs.jsonl"), "tokenizer": str(root / "tokenizer")}
    data |= {"source_tokens": 16, "target_tokens": 10, "batch_size": 8, "validation_fraction": 0.1}
    optimizer = {"learning_rate": 0.02, "schedule": {"decay": "constant"}}
    base = {"model": model, "data": data, "optimizer": optimizer, "run": {"steps": steps}, "output": str(root / output)}
    return {**base, **sections}


@pytest.fixture(scope="module")
def adapted(folder: Path) -> Path:
    config = config_of(folder, "adapted", 12, run={"steps": 12, "init_from": str(folder / "base")})
    rules = [{"path": "(query|value)/kernel", "rank": 4}]
    train(parse_run({**config, "lora": {"rules": rules}, "optimizer": {"learning_rate": 0.1}}))
    return folder / "adapted"


def test_adapters_of_both_stacks_learn_and_go_to_peft(adapted, folder, tmp_path):
    found = losses(adapted)
    assert found[-1] < found[0] - 0.3
    main(["convert", str(adapted), f"peft:{tmp_path / 'peft'}"])
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    places = ("encoder.block.1.layer.0.SelfAttention.q", "decoder.block.0.layer.1.EncDecAttention.v")
    assert {f"base_model.model.{place}.lora_A.weight" for place in places} <= tensors.keys()
    # 2 layers of 2 matrices in the encoder and 4 in the decoder, each with two factors.
    assert len(tensors) == 2 * 2 * (2 + 4)
    main(["convert", str(adapted), f"hf:{tmp_path / 'hf'}"])
    merged = stack_train.load(f"hf:{tmp_path / 'hf'}").generate("abc", **GREEDY)
    assert merged == stack_train.load(adapted).generate("abc", **GREEDY)


def test_a_quantized_one_generates(folder, tmp_path):
    main(["quantize", str(folder / "base"), "--recipe=w8a8", "--out", str(tmp_path / "int8"), "--evaluation-batches=0"])
    model = stack_train.load(tmp_path / "int8")
    params = jax.tree.leaves(model.checkpoint.load_params(), is_leaf=is_quantized)
    # Seven matrices of the encoder's layers and eleven of the decoder's.
    assert sum(map(is_quantized, params)) >= 18
    assert 0 < len(model.generate("abc", **GREEDY).tokens) <= 6


def test_servers_refuse_it_by_name(folder, capsys):
    with pytest.raises(GenerationError, match="is an encoder-decoder: it generates a target from a source text"):
        LLM(str(folder / "base"))
    with pytest.raises(SystemExit):
        main(["serve", str(folder / "base")])
    assert "is an encoder-decoder" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"name": "text", "source": "stdlib", "seq_tokens": 16}},
            "data.name='text' has no sources. Set data.name",
        ),
        ({"model": {"name": "llama", "vocab_size": 6}}, "for encoder-decoders such as t5, not for family 'llama'"),
    ],
)
def test_sections_that_do_not_fit_are_refused(folder, sections, message, tmp_path, capsys):
    import yaml

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_of(folder, "refused", 1, **sections)))
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "config.yaml")])
    assert message in " ".join(capsys.readouterr().err.split())
