"""A tiny random model whose tokens are bytes, for tests of constraints."""

from typing import Any

from ..openai.fake_engine import EOS, TEMPLATE, VOCAB_SIZE, ByteTokenizer
from .tiny_checkpoint import TinyCheckpoint, random_params


def byte_checkpoint(**changes: Any) -> TinyCheckpoint:
    parts = {
        "read": lambda: random_params(0, VOCAB_SIZE),
        "vocab_size": VOCAB_SIZE,
        "tokenizer": ByteTokenizer(),
        "end_tokens": frozenset({EOS}),
        "max_positions": 256,
        "chat_template": TEMPLATE,
        "special_tokens": {"bos_token": "<s>", "eos_token": "</s>"},
    }
    return TinyCheckpoint(**{**parts, **changes})
