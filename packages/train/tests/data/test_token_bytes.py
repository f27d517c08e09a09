import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stack_train.data.token_bytes import TokenBytes


def _byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("\u0120", "a"), ("\u00c3", "\u00a9"), ("\u00c3\u00a9", "a")]
    tokens = [*letters, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end\u2581of\u2581text|>"])
    tokenizer.add_tokens([AddedToken("two words")])
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As of SentencePiece: spaces are written as U+2581, bytes as <0x00> to <0xFF>, the first space is dropped."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581a", "a", "\u00e9"]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


TOKENIZERS = {"byte level": _byte_level(), "byte fallback": _byte_fallback()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text().filter(lambda text: "\u2581" not in text))  # which SentencePiece takes for a space
def test_bytes_of_tokens_add_up_to_their_text(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_bytes = TokenBytes(tokenizer)
    assert b"".join(map(token_bytes, tokenizer.encode(text).ids)) == text.encode()


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("byte level", "\u00c3", b"\xc3"),
        ("byte level", "\u00c3\u00a9a", "\u00e9a".encode()),
        ("byte level", "\u0120a", b" a"),
        ("byte level", "<|end\u2581of\u2581text|>", "<|end\u2581of\u2581text|>".encode()),
        ("byte level", "two words", b"two words"),
        ("byte fallback", "<0xC3>", b"\xc3"),
        ("byte fallback", "\u2581a", b" a"),
        ("byte fallback", "\u2581", b" "),
        ("byte fallback", "\u00e9", "\u00e9".encode()),
        ("byte fallback", "</s>", b"</s>"),
    ],
)
def test_bytes_of_a_token(name: str, token: str, expected: bytes) -> None:
    tokenizer = TOKENIZERS[name]
    assert TokenBytes(tokenizer)(tokenizer.token_to_id(token)) == expected


def test_pieces_of_words_are_as_within_a_text() -> None:
    tokenizer = Tokenizer(models.WordPiece({"play": 0, "##ing": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert [TokenBytes(tokenizer)(token) for token in (0, 1)] == [b" play", b"ing"]


def test_an_id_that_is_no_token_stands_for_nothing() -> None:
    assert TokenBytes(_byte_level())(10_000) == b""
