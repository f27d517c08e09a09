"""Small tokenizers of every kind that language models are published with, trained on a few words."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = ["Assistant: Paris is the capital. User: What is the capital of France? naïve 😀"] * 4
SPECIAL = ["<|end|>", "<|user|>"]
LETTERS = sorted({letter for text in TEXTS for letter in text} | {"▁"})


def byte_level(*, trims: bool = True, prepends: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prepends)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    tokenizer.decoder = decoders.ByteLevel()
    return _trained(tokenizer, sorted(pre_tokenizers.ByteLevel.alphabet()))


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return _trained(tokenizer, LETTERS)


def prepending() -> Tokenizer:
    """As Llama 2 is published: a normalizer writes a space before each text, and there is no cut into words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # the words to learn merges of
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    _trained(tokenizer, LETTERS)
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: byte_level(trims=False),
    "byte-level, trimmed offsets": byte_level,
    "byte-level, prepending": lambda: byte_level(trims=False, prepends=True),
    "byte-level, prepending, trimmed offsets": lambda: byte_level(prepends=True),
    "metaspace": lambda: metaspace("never"),
    "metaspace, prepending once": lambda: metaspace("first"),
    "metaspace, prepending always": lambda: metaspace("always"),
    "prepending normalizer": prepending,
}


def write_kind(directory: Path, kind: str, template: str | None = None) -> Path:
    """Writes a tokenizer whose end-of-text token is <|end|>."""
    directory.mkdir(parents=True, exist_ok=True)
    KINDS[kind]().save(str(directory / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[0], "tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {} if template is None else {"chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def _trained(tokenizer: Tokenizer, alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer
