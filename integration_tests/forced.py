"""A tiny Llama whose weights force its answers, with tool calls and reasoning in them."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from .served import EMBED, write_checkpoint

__all__ = ["ANSWER", "CALL", "MESSAGES", "PARAMETERS", "SECOND", "TEMPLATE", "TOOLS", "write_forced_checkpoint"]

# Each token of an answer determines the next. The answer depends on the last token of the prompt.
BEGIN, FINAL = "<|assistant|>", "<|final|>"
CALL = [
    "Let me",
    " see.\n",
    '<tool_call>\n{"name": "add", ',
    '"arguments": {"x"',
    ": 17, ",
    '"y": 25}}',
    "\n</tool_call>",
]
SECOND = ['\n<tool_call>\n{"name": "mul", ', '"arguments": {}}', "\n</tool_call>\n"]
ANSWER = ["<think>", "\nAll", " done.\n", "</think>\n\n", "It is", " 42."]
END = "</s>"
CHAINS = [[BEGIN, *CALL, *SECOND, END], [FINAL, *ANSWER, END]]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content or '' }}"
    """{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", """
    """"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"""
    "{% if messages[-1].role == 'tool' %}<|final|>{% else %}<|assistant|>{% endif %}{# <think> </think> #}"
)
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "mul")]
MESSAGES: Any = [{"role": "user", "content": "17 + 25?"}]


def write_forced_checkpoint(directory: Path) -> None:
    """Writes a model whose layers add nothing, and whose head maps each token to the next of its chain."""
    write_checkpoint(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = list(dict.fromkeys(word for chain in CHAINS for word in chain if word not in (BEGIN, END)))
    # The last pairs of bytes give their places in the vocabulary to the words.
    merges = tokenizer["model"]["merges"]
    del merges[-len(words) :]
    vocab = tokenizer["model"]["vocab"]
    places = sorted(vocab.values())[-len(words) :]
    tokenizer["model"]["vocab"] = {token: place for token, place in vocab.items() if place not in places}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": place, "content": word, "special": word == FINAL, **flags}
        for place, word in zip(places, words, strict=True)
    ]
    path.write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))

    ids = dict(zip(words, places, strict=True)) | {BEGIN: 3, END: 1}
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")) or "embed_tokens" in name or name == "lm_head.weight":
            tensors[name] = np.zeros_like(tensors[name])
    steps = [pair for chain in CHAINS for pair in itertools.pairwise(chain)]
    assert len(steps) <= EMBED
    for feature, (token, following) in enumerate(steps):
        tensors["model.embed_tokens.weight"][ids[token], feature] = 1
        tensors["lm_head.weight"][ids[following], feature] = 9
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
