"""Tiny runs of models with random weights and a tokenizer, for conversions."""

import json
from pathlib import Path

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from stack_core.abi.config import parse, to_yaml
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_train.checkpoint import CheckpointStore
from stack_train.run.config import RunConfig
from stack_train.variables.model_variables import values_of

from ..random_models import draw_model

TEXT = ["the cat sat on the mat", "a dog and a cat", "it's 1234 o'clock, isn't it?  yes", "naïve café"] * 4
VOCAB = 320
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SIZES = {
    "vocab_size": VOCAB,
    "embed": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "mlp": 96,
    "max_positions": 128,
    "dtype": "float32",
    "param_dtype": "float32",
}


def write_tokenizer(directory: Path, *, vocab_size: int = VOCAB, pre_tokenizer=None) -> None:
    """A byte-level BPE that begins prompts with a special token."""
    special = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(TEXT, trainer)
    built.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(built.to_str())
    names = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    (directory / "chat_template.jinja").write_text(TEMPLATE)


def make_run(run: Path, family: str = "llama", **fields) -> RunConfig:
    """A run whose only checkpoint has random weights, biases and norms among them."""
    model = {"name": family, **SIZES, **fields}
    config = parse(RunConfig, {"output": str(run), "model": model, "data": {"tokenizer": str(run / "tokenizer")}})
    drawn = draw_model(lambda: registries.models[family].build(config.model, key=jax.random.key(0)))
    values = {"/".join(map(str, path)): np.asarray(value) for path, value in values_of(drawn).items()}
    paths = RunDirectory(run)
    write_tokenizer(paths.tokenizer)
    with CheckpointStore(paths.checkpoints) as store:
        store.save_weights(values.items(), to_yaml(config))
    paths.config.write_text(to_yaml(config))
    return config
