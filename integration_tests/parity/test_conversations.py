"""The tokens of conversations that are learned, beside the mask of transformers."""

import sys
from pathlib import Path

import pytest
import transformers

from stack_train.data.conversations import Tokenization
from stack_train.data.tokenizer import HuggingFaceTokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "train" / "tests" / "data" / "kinds"))
from tokenizer_kinds import KINDS, write_kind

pytestmark = pytest.mark.parity

TURN = "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
REST = "{% else %}<|user|>{{ m.content }}\n{% endif %}{% endfor %}"
HEAD = "{{ tools | tojson if tools }}{{ style }}{% for m in messages %}{% if m.role == 'assistant' %}"
TEMPLATES = {
    "behind a space": f"{HEAD}Assistant: {TURN}{REST}",
    "behind an end of line": f"{HEAD}Assistant:\n{TURN}{REST}",
    "behind a token": f"{HEAD}<|user|>{TURN}{REST}",
    "a space of its own": f"{HEAD}Assistant:{TURN.replace('{{', ' {{')}{REST}",
    "without its end": f"{HEAD}Assistant: {TURN.replace('<|end|>', '')} {REST}",
}
RECORD = {
    "messages": [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris is the capital."},
        {"role": "user", "content": "naïve 😀?"},
        {"role": "assistant", "content": "😀 France. User"},
    ],
    "tools": [{"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {}}}],
    "chat_template_kwargs": {"style": "naïve"},
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_mask_of_the_assistants_tokens(tmp_path, kind, template):
    # Before 5.24, transformers masks an answer completely if offsets leave out the space that it begins with. The same
    # tokenizer with complete offsets has the right mask.
    write_kind(tmp_path / "theirs", kind.removesuffix(", trimmed offsets"), TEMPLATES[template])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs").apply_chat_template(
        RECORD["messages"],
        tools=RECORD["tools"],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        **RECORD["chat_template_kwargs"],
    )
    write_kind(tmp_path / "ours", kind, TEMPLATES[template])
    ours = Tokenization.by_template_of(HuggingFaceTokenizer.load(tmp_path / "ours")).conversation("a:1", RECORD)
    assert ours.tokens.tolist() == theirs["input_ids"]
    assert ours.supervised.astype(int).tolist() == theirs["assistant_masks"]
    assert 0 < ours.supervised.sum() < len(ours.tokens)
