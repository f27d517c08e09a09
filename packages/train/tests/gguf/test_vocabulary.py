"""Tokenizers in GGUF: written with the same ids, or refused by name."""

import json
import warnings

import pytest
from tokenizers import Tokenizer, models

from stack_core.abi.errors import ConversionError
from stack_train.data.tokenizer import HuggingFaceTokenizer
from stack_train.gguf import FORMAT
from stack_train.gguf.cuts import CUTS, pre_tokenizer_of
from stack_train.gguf.representable import TEXTS
from stack_train.gguf.vocabulary import Vocabulary

from .tiny_runs import VOCAB, make_run, write_tokenizer

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Digits", "individual_digits": True}
BOS, EOS, TEXT = (
    {"SpecialToken": {"id": "<|begin|>", "type_id": 0}},
    {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
    {"Sequence": {"id": "A", "type_id": 0}},
)
TOKENS = {name: {"id": name, "ids": [index], "tokens": [name]} for index, name in enumerate(["<|begin|>", "<|end|>"])}


def template(*pieces):
    return {"type": "TemplateProcessing", "single": [*pieces], "pair": [*pieces, TEXT], "special_tokens": TOKENS}


def make(directory, change=lambda content: None, **settings):
    """A byte-level tokenizer of which `change` edits the contents of its tokenizer.json."""
    write_tokenizer(directory)
    content = json.loads((directory / "tokenizer.json").read_text())
    change(content)
    (directory / "tokenizer.json").write_text(json.dumps(content))
    names = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**names, **settings}))
    return HuggingFaceTokenizer.load(directory)


def written(vocabulary):
    """The tokenizer that is read from what a file has of a vocabulary."""
    return HuggingFaceTokenizer(Vocabulary.read(dict(vocabulary.settings())).files(), "again")


def setting(**parts):
    return lambda content: content.update(parts)


def of_model(**fields):
    return lambda content: content["model"].update(fields)


def flagged(**flags):
    return lambda content: content["added_tokens"][2].update(flags)


def prefixed(content):
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [DIGITS, {**BYTES, "add_prefix_space": True}]}


def unreachable(content):
    """A token that no merges make; with its flag, BPE finds it nevertheless."""
    content["model"]["vocab"]["xyzzy"] = max(content["model"]["vocab"].values()) + 1
    content["model"]["ignore_merges"] = True


def missing_byte(content):
    content["model"]["vocab"].pop("\u00ff")
    content["model"]["unk_token"] = "<|end|>"


WRITTEN = {
    "bytes without a token": (lambda content: content["model"]["vocab"].pop("\u00ff"), "gpt-2"),
    "as it is": (lambda content: None, "gpt-2"),
    "an end of text by its template": (setting(post_processor=template(BOS, TEXT, EOS)), "gpt-2"),
    "an end of text alone": (setting(post_processor=template(TEXT, EOS)), "gpt-2"),
    "no template": (setting(post_processor=None), "gpt-2"),
    "digits alone": (
        setting(pre_tokenizer={"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}),
        "smollm",
    ),
    "an empty normalizer": (setting(normalizer={"type": "Sequence", "normalizers": []}), "gpt-2"),
    "ignored merges that make each token anyway": (of_model(ignore_merges=True), "gpt-2"),
    "a token of the user": (flagged(special=False), "gpt-2"),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_encodes_alike(tmp_path, name):
    change, cut = WRITTEN[name]
    tokenizer = make(tmp_path / "tokenizer", change, unk_token="<|im_start|>")
    vocabulary = Vocabulary.of(tokenizer, VOCAB)
    again = written(vocabulary)
    assert vocabulary.cut == cut
    for text in (*TEXTS, "a <|im_start|> b<|im_end|>"):
        assert again.encode_for_encoder(text) == tokenizer.encode_for_encoder(text)
        assert again.encode(text) == tokenizer.encode(text)
        assert again.encode_batch([text])[0].tolist() == tokenizer.encode_batch([text])[0].tolist()
    assert again.special_tokens == tokenizer.special_tokens


REFUSED = {
    "Lowercase": (setting(normalizer={"type": "Lowercase"}), "normalizer Lowercase has no place"),
    "NFKC": (
        setting(normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}),
        "normalizer NFKC has no place",
    ),
    "Prepend": (setting(normalizer={"type": "Prepend", "prepend": "x"}), "normalizer Prepend has no place"),
    "a space before": (setting(pre_tokenizer={**BYTES, "add_prefix_space": True}), "a space before each text"),
    "a space before, in a sequence": (prefixed, "a space before each text"),
    "lstrip": (flagged(lstrip=True), r"'<\|im_start\|>' has lstrip, which"),
    "rstrip and single_word": (flagged(rstrip=True, single_word=True), "has rstrip and single_word"),
    "another token behind": (
        setting(
            post_processor={
                **template(TEXT, {"SpecialToken": {"id": "<|im_end|>", "type_id": 0}}),
                "special_tokens": {"<|im_end|>": {"id": "<|im_end|>", "ids": [3], "tokens": ["<|im_end|>"]}},
            }
        ),
        r"adds \['<\|im_end\|>'\] behind each text",
    ),
    "an unknown pattern": (
        setting(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": "q+"}, "behavior": "Isolated", "invert": False},
                    BYTES,
                ],
            }
        ),
        r'cuts text by \["q\+", .*which GGUF has no name for',
    ),
    "merged pieces": (
        setting(
            pre_tokenizer={
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithNext", "invert": False},
                    BYTES,
                ],
            }
        ),
        "MergedWithNext.* has no place in GGUF",
    ),
    "no bytes": (setting(pre_tokenizer={"type": "Whitespace"}), "cuts text by Whitespace"),
    "ignored merges": (unreachable, r"ignores merges, .*'xyzzy' would be cut"),
    "dropout": (of_model(dropout=0.1), "dropout=0.1"),
    "ends of words": (of_model(end_of_word_suffix="</w>"), "end_of_word_suffix"),
    "a missing byte": (missing_byte, r"no token for 1 of the 256 bytes, '\u00ff' among them, and writes '<\|end\|>'"),
    "another decoder": (setting(decoder={"type": "Fuse"}), "decodes by Fuse"),
    "one text twice": (
        lambda content: content["added_tokens"].append({**content["added_tokens"][0], "id": 319, "content": "a"}),
        "are both 'a'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_by_name(tmp_path, name):
    change, message = REFUSED[name]
    with pytest.raises(ConversionError, match=message):
        Vocabulary.of(make(tmp_path / "tokenizer", change), VOCAB + 1)


def test_a_refusal_leaves_no_file(tmp_path):
    make_run(tmp_path / "run")
    content = json.loads((tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text())
    prefixed(content)
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConversionError, match="a space before each text"):
        FORMAT.export_run(tmp_path / "run", tmp_path / "model.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_model_with_fewer_tokens_than_its_tokenizer_is_refused(tmp_path):
    tokenizer = make(tmp_path / "tokenizer")
    most = tokenizer.vocab_size - 1
    with pytest.raises(ConversionError, match=f"up to id {most}, but the model has {most} tokens"):
        Vocabulary.of(tokenizer, most)


def test_ids_are_compared_before_a_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(Vocabulary, "_post_processor", lambda self: None)  # a fault of ours
    with pytest.raises(ConversionError, match=r"encodes '' as .* from GGUF\. It is not written"):
        Vocabulary.of(make(tmp_path / "tokenizer"), VOCAB)


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_of_llama_cpp_is_read_and_written(tmp_path, name):
    cut = CUTS[name]

    def change(content):
        content["pre_tokenizer"] = pre_tokenizer_of(cut)
        content["normalizer"] = {"type": "NFC"} if cut.composes else None
        content["model"]["ignore_merges"] = cut.ignores_merges

    tokenizer = make(tmp_path / "tokenizer", change)
    if not cut.is_exact:
        with pytest.raises(ConversionError, match=r"cuts some texts differently by (tiny_aya|superbpe)"):
            Vocabulary.of(tokenizer, VOCAB)
        return
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        vocabulary = Vocabulary.of(tokenizer, VOCAB)
    assert any("composes characters first" in str(each.message) for each in found) == cut.composes
    assert CUTS[vocabulary.cut] == cut
    file = {**dict(vocabulary.settings()), "tokenizer.ggml.pre": name}
    del file["tokenizer.ggml.add_bos_token"]
    again = HuggingFaceTokenizer(Vocabulary.read(file).files(), "again")
    for text in TEXTS:
        assert again.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
        assert (
            b"".join(map(again.token_bytes, again.encode(text, add_special_tokens=False))).decode() == text
            or cut.composes
        )
    assert again.encode("a")[:-1] == ([tokenizer.bos_id] if cut.adds_bos else [])


PIECES = {
    "gpt-2": "It|'s| 12345| o|'|CLOCK|,| | isn|'t| it|?!|\n",
    "smollm": "It|'s| |1|2|3|4|5| o|'|CLOCK|,| | isn|'t| it|?!|\n",
    "llama-bpe": "It|'s| |123|45| o|'CLOCK|,| | isn|'t| it|?!\n",
    "qwen2": "It|'s| |1|2|3|4|5| o|'CLOCK|,| | isn|'t| it|?!\n",
    "tekken": "It|'s| |1|2|3|4|5| o|'CLOCK|,| | isn|'t| it|?!\n",
    "gpt-4o": "It's| |123|45| o|'CLOCK|,| | isn't| it|?!\n",
    "deepseek-v3": "It|'s| |123|45| o|'CLOCK|,| | isn|'t| it|?!\n",
    "deepseek-coder": "It|'|s| |1|2|3|4|5| o|'|CLOCK|,| | isn|'|t| it|?!|\n",
    "tiny_aya": "It's| |12|345| o|'CLOCK|,| | isn't| it|?!\n",
    "afmoe": "It|'s| |12|345| o|'CLOCK|,| | isn|'t| it|?!\n",
    "superbpe": "It's |12|345| o'CLOCK,  isn't it?!\n",
    "bloom": "It's| 12345| o'CLOCK|, | isn't| it|?!\n",
}


@pytest.mark.parametrize("name", PIECES)
def test_the_pieces_that_a_cut_makes(name):
    tokenizer = Tokenizer(models.BPE())
    built = json.loads(tokenizer.to_str())
    tokenizer = Tokenizer.from_str(json.dumps({**built, "pre_tokenizer": pre_tokenizer_of(CUTS[name])}))
    text = "It's 12345 o'CLOCK,  isn't it?!\n"
    found = [text[begin:end] for _, (begin, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(found) == PIECES[name]


@pytest.mark.parametrize("kind", ["Unigram", "BPE with bytes as a fallback"])
def test_tokenizers_of_sentencepiece_are_refused_by_their_kind(kind):
    pieces = [(f"<0x{index:02X}>", 0.0) for index in range(256)]
    vocab = {piece: index for index, (piece, _) in enumerate(pieces)}
    model = models.Unigram(pieces) if kind == "Unigram" else models.BPE(vocab, [], byte_fallback=True)
    tokenizer = HuggingFaceTokenizer({"tokenizer.json": Tokenizer(model).to_str().encode()}, "pieces")
    with pytest.raises(ConversionError, match=rf"The tokenizer is a {kind}; byte-level BPE is written"):
        Vocabulary.of(tokenizer, 256)
    with pytest.raises(ConversionError, match=r"The file's tokenizer is 'llama', .*'gpt2' is read"):
        Vocabulary.read({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": list(vocab)})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer.ggml.pre": "gemma4"}, "'gemma4', whose tokens are not bytes; 'gpt2' is read"),
        ({"tokenizer.ggml.pre": "smolm"}, "cuts text as 'smolm'; 'gpt2' is read, cut as one of gpt-2"),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "adds its bos_token to texts, but names none"),
        ({"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_eos_token": True}, "adds its eos_token to texts, but"),
    ],
)
def test_files_whose_tokenizer_is_not_certain_are_refused(settings, message):
    with pytest.raises(ConversionError, match=message):
        Vocabulary.read({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], **settings})


def test_a_file_that_names_no_cut_is_read_with_a_warning():
    with pytest.warns(UserWarning, match=r"does not name how its tokenizer cuts text \(tokenizer\.ggml\.pre\)"):
        found = Vocabulary.read({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"]})
    assert found.cut == "default"
