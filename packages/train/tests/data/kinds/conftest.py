"""A tokenizer with a chat template, and JSONL files."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture
def make_tokenizer(tmp_path: Path) -> Callable[[str | None], Path]:
    """Writes a tokenizer of bytes with special tokens, and returns its directory."""

    def make(template: str | None) -> Path:
        specials = ["<|im_start|>", "<|im_end|>"]
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate([*specials, *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(token, special=True) for token in specials])
        directory = tmp_path / "tokenizer"
        directory.mkdir(exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        settings = {"eos_token": "<|im_end|>"} | ({} if template is None else {"chat_template": template})
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        return directory

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[[Sequence[Mapping[str, Any]]], Path]:
    def write(records: Sequence[Mapping[str, Any]]) -> Path:
        path = tmp_path / "records.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write
