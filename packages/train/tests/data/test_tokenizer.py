import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from stack_core.abi.data import Tokenizer as TokenizerProtocol
from stack_core.abi.errors import DataError
from stack_train.data.tokenizer import HuggingFaceTokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SETTINGS = {"eos_token": {"content": "<eos>"}, "bos_token": "<bos>", "chat_template": "in the config"}


def _vocabulary() -> bytes:
    """Every byte is a token, in the order of the alphabet, then <eos> (256) and <bos> (257)."""
    tokenizer = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate(ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    return tokenizer.to_str().encode()


def _make(settings: dict[str, object] | None = None, **files: bytes) -> HuggingFaceTokenizer:
    content = {"tokenizer.json": _vocabulary(), "tokenizer_config.json": json.dumps(settings or SETTINGS).encode()}
    return HuggingFaceTokenizer(content | files, "test")


TOKENIZER = _make()


@given(st.text())
def test_text_survives(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode_batch([text])[0].tolist()) == text


def test_is_a_tokenizer_that_knows_its_special_tokens() -> None:
    assert isinstance(TOKENIZER, TokenizerProtocol)
    assert (TOKENIZER.eos_id, TOKENIZER.bos_id, TOKENIZER.pad_id, TOKENIZER.vocab_size) == (256, 257, None, 258)


def test_knows_the_bytes_of_its_tokens() -> None:
    assert b"".join(map(TOKENIZER.token_bytes, TOKENIZER.encode("\u00e9<eos>"))) == "\u00e9<eos>".encode()


def test_truncation_and_padding_of_the_file_are_not_applied() -> None:
    assert len(TOKENIZER.encode("0123456789")) == 10
    assert [len(ids) for ids in TOKENIZER.encode_batch(["a", "0123456789"])] == [1, 10]


def test_other_threads_go_on_while_a_long_text_is_encoded() -> None:
    text = "<eos>abc def " * 20_000
    encoding = threading.Thread(target=lambda: TOKENIZER.encode(text))
    turns = 0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10
    assert TOKENIZER.encode(text) == TOKENIZER.encode("<eos>abc def ") * 20_000


def test_names_of_special_tokens_are_tokens_in_prompts_and_text_in_documents() -> None:
    assert TOKENIZER.encode("<eos>") == [256]
    (ids,) = TOKENIZER.encode_batch(["<eos>"])
    assert ids.dtype == np.int64
    assert ids.tolist() == [ALPHABET.index(symbol) for symbol in "<eos>"]
    assert TOKENIZER.decode([256, 66, 257]) == TOKENIZER.decode([66])


def test_beginning_of_text_is_added_where_the_config_asks_for_it() -> None:
    prefixed = _make(SETTINGS | {"add_bos_token": True})
    assert prefixed.encode("a")[0] == 257
    assert prefixed.encode("<bos>a", add_special_tokens=False) == [257, ALPHABET.index("a")]
    assert prefixed.encode_batch(["a"])[0][0] == 257
    assert prefixed.digest != TOKENIZER.digest


def test_an_answer_follows_a_prompt_whose_tokenizer_ends_texts_with_eos() -> None:
    tokenizer = Tokenizer.from_str(_vocabulary().decode())
    specials = [("<eos>", 256), ("<bos>", 257)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=specials)
    both = _make(**{"tokenizer.json": tokenizer.to_str().encode()})
    a = ALPHABET.index("a")
    assert both.encode("a") == [257, a]
    assert both.encode_for_encoder("a") == [257, a, 256]
    assert both.encode("a", add_special_tokens=False) == [a]
    assert both.encode_batch(["a"])[0].tolist() == [257, a, 256]


@pytest.mark.parametrize("sequence", [False, True])
def test_offsets_include_the_spaces_that_a_tokenizer_trims(sequence: bool) -> None:
    tokenizer = Tokenizer.from_str(_vocabulary().decode())
    trims = processors.ByteLevel(trim_offsets=True)
    tokenizer.post_processor = processors.Sequence([trims]) if sequence else trims
    ids, offsets = _make(**{"tokenizer.json": tokenizer.to_str().encode()}).encode_with_offsets("a  b")
    assert len(ids) == 4 and offsets.tolist() == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_every_file_is_kept_byte_for_byte(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "run" / "tokenizer"
    TOKENIZER.save(source)
    (source / "chat_template.jinja").write_bytes(b"{{ messages }}\r\n")
    (source / "model.safetensors").write_bytes(b"no part of a tokenizer")
    HuggingFaceTokenizer.load(source).save(copy)
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in copy.iterdir()} == names
    assert all((copy / name).read_bytes() == (source / name).read_bytes() for name in names)
    loaded = HuggingFaceTokenizer.load(copy / "tokenizer.json")
    assert loaded.chat_template == "{{ messages }}\r\n"
    assert loaded.digest == TOKENIZER.digest


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("one", "one"),
        ([{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
        ([], None),
        (None, None),
    ],
)
def test_chat_template_of_the_config(template: object, expected: str | None) -> None:
    assert _make(SETTINGS | {"chat_template": template}).chat_template == expected


def test_special_tokens_map_is_read_where_the_config_says_nothing() -> None:
    settings = json.dumps({"pad_token": "<eos>", "eos_token": "overruled"}).encode()
    tokenizer = _make(**{"special_tokens_map.json": settings})
    assert (tokenizer.pad_id, tokenizer.eos_id) == (256, 256)


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer at .*bep'.*tokenizer.json' is missing. .* 'bpe' to train one"):
        HuggingFaceTokenizer.load(tmp_path / "bep")
    with pytest.raises(DataError, match=r"The tokenizer.json of tokenizer 'test' is malformed"):
        _make(**{"tokenizer.json": b"{}"})
    with pytest.raises(DataError, match=r"tokenizer_config.json of tokenizer 'test' is not JSON"):
        _make(**{"tokenizer_config.json": b"{"})
    with pytest.raises(DataError, match=r"tokenizer_config.json of tokenizer 'test' holds a list"):
        _make(**{"tokenizer_config.json": b"[]"})
    with pytest.raises(DataError, match=r"names '</s>' as its eos_token, but its vocabulary has no such token"):
        _make({"eos_token": "</s>"})
