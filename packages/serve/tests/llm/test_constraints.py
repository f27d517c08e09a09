import sys
from typing import Any

import numpy as np
import pytest

from stack_core.abi.errors import GenerationError
from stack_core.abi.generation import Constraint
from stack_serve.llm import constraints
from stack_serve.llm.constraints import ConstraintCompiler

from ..openai.fake_engine import BOS, EOS, VOCAB_SIZE, ByteTokenizer


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(ByteTokenizer(), VOCAB_SIZE, {EOS})


def allowed(compiler: ConstraintCompiler, constraint: Constraint, text: bytes = b"") -> set[int]:
    """Tokens that may follow a text."""
    matcher = compiler.matcher(constraint)
    for token in text:
        matcher.advance(token)
    (mask,) = compiler.masks([matcher])
    assert matcher.error is None
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("language", "reason"),
    [
        ({"json_schema": {"type": "array", "uniqueItems": True}}, r'json_schema .*keys: \["uniqueItems"\]'),
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, r'Unimplemented keys: \["not"\]'),
        ({"json_schema": {"oneOf": [{"type": "string"}, {"minLength": 3}]}}, "oneOf constraints are not supported"),
        ({"json_schema": {"type": "text"}}, "Invalid type: text"),
        ({"json_schema": {"$ref": "#/definitions/x"}}, "'/definitions/x' does not exist"),
        ({"json_schema": {"$ref": "https://example.org/schema"}}, "example.org"),
        ({"json_schema": {"$ref": "#"}}, "no text matches"),
        ({"json_schema": {"type": "string", "format": "isbn"}}, "Unknown format: isbn"),
        ({"json_schema": {"minimum": 3, "maximum": 2, "type": "integer"}}, "Unsatisfiable"),
        ({"json_schema": "{'type': 1}"}, "json_schema .*property name"),
        ({"json_schema": "[1]"}, r"an object or a boolean, not \[1\]"),
        ({"json_schema": True, "whitespace": "("}, "unclosed group"),
        ({"regex": "a("}, "regex .*unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": r"[^\s\S]"}, "no text matches"),
        ({"grammar": "start: missing"}, 'grammar .*unknown name: "missing"'),
        ({"grammar": "nothing of this kind"}, "grammar"),
        ({"grammar": "start: <[100000]>"}, "range end too large"),
    ],
)
def test_languages_that_cannot_be_compiled_are_refused_with_the_reason(
    compiler: ConstraintCompiler, language: dict[str, Any], reason: str
) -> None:
    with pytest.raises(GenerationError, match=reason) as caught:
        compiler.matcher(Constraint(**language))
    assert caught.value.parameter == "constraint" and len(str(caught.value)) < 700


def test_the_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GenerationError, match=r"needs? the package llguidance.*install.*\[structured\]") as caught:
        ConstraintCompiler(ByteTokenizer(), VOCAB_SIZE, {EOS})
    assert caught.value.parameter == "constraint"


def test_masks_follow_each_language(compiler: ConstraintCompiler) -> None:
    word, letters = Constraint(choice=("hello", 'h"\\')), Constraint(regex="[ab]+")
    assert allowed(compiler, word) == {ord("h"), 261}  # 261 is the token " hello" without its space: "hello"
    assert allowed(compiler, word, b"h") == {ord("e"), ord('"')}
    assert allowed(compiler, word, b"hello") == {EOS}
    assert allowed(compiler, letters) == {97, 98} and allowed(compiler, letters, b"a") == {97, 98, EOS}
    nested = Constraint(grammar='root ::= "(" root ")" | "x"')
    assert allowed(compiler, nested, b"((x)") == {ord(")")} and allowed(compiler, nested, b"(x)") == {EOS}
    assert allowed(compiler, Constraint(grammar='start: "x" "y"?'), b"x") == {ord("y"), EOS}
    assert allowed(compiler, Constraint(json_schema={"const": 5})) == {ord("5")}


def test_special_tokens_are_not_text_even_if_their_names_are_allowed(compiler: ConstraintCompiler) -> None:
    tokens = allowed(compiler, Constraint(regex=r"<[a-z/|]+>"))
    assert tokens == {ord("<")}
    newline_ends = ConstraintCompiler(ByteTokenizer(), VOCAB_SIZE, {EOS, ord("\n")})
    assert ord("\n") not in allowed(newline_ends, Constraint(regex="[^a]+"))
    assert {ord("\n"), EOS} <= allowed(newline_ends, Constraint(regex="[^a]+"), b"x")
    assert BOS not in allowed(compiler, Constraint(regex="[^a]+"))


def test_a_vocabulary_may_have_no_end_token_and_more_logits_than_tokens() -> None:
    wide = ConstraintCompiler(ByteTokenizer(), 320, ())
    assert allowed(wide, Constraint(regex="ab?"), b"a") == {ord("b")}
    assert allowed(wide, Constraint(regex="ab?"), b"ab") == set()
    assert wide.masks([None]).shape == (1, 10) and np.all(wide.masks([None]) == -1)


def test_json_has_little_space_unless_the_constraint_describes_it(compiler: ConstraintCompiler) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 1}
    usual, none = Constraint(json_schema=schema), Constraint(json_schema=schema, whitespace="")
    assert allowed(compiler, usual, b"[") == {ord("1"), *b" \n\r"}
    assert allowed(compiler, usual, b"[\n" + b" " * 31) == {ord("1"), *b" \t"}
    assert allowed(compiler, usual, b"[ ") == allowed(compiler, usual, b"[\n" + b" " * 32) == {ord("1")}
    assert allowed(compiler, none, b"[") == {ord("1")}


def test_rows_have_masks_of_their_own(compiler: ConstraintCompiler) -> None:
    one, other = (compiler.matcher(Constraint(regex=regex)) for regex in ("a", "b"))
    masks = compiler.masks([None, one, None, other])
    assert np.all(masks[[0, 2]] == -1)
    np.testing.assert_array_equal(masks[1], compiler.masks([one])[0])
    np.testing.assert_array_equal(masks[3], compiler.masks([other])[0])
    assert np.any(masks[1] & compiler.text_tokens) and np.any(masks[0] & compiler.text_tokens)
    one.advance(ord("a"))
    assert not np.any(compiler.masks([one]) & compiler.text_tokens)


def test_compiled_constraints_are_kept_and_the_oldest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, compiled = ConstraintCompiler(ByteTokenizer(), VOCAB_SIZE, {EOS}), list[Constraint]()
    original = ConstraintCompiler._compile
    monkeypatch.setattr(constraints, "_MOST_CACHED", 2)
    monkeypatch.setattr(
        ConstraintCompiler, "_compile", lambda self, each: compiled.append(each) or original(self, each)
    )
    first, second, third = (Constraint(regex=letter) for letter in "abc")
    compiler.matcher(first).advance(ord("a"))
    assert allowed(compiler, first) == {ord("a")}  # the matcher that advanced was a copy
    for each in (second, first, third, first):
        compiler.matcher(each)
    assert compiled == [first, second, third]
    compiler.matcher(second)
    assert compiled == [first, second, third, second]


def test_a_parser_that_gives_up_tells_why(compiler: ConstraintCompiler) -> None:
    matcher = compiler.matcher(Constraint(regex="a+"))
    matcher.advance(ord("b"))
    assert matcher.error is not None and "satisfy the grammar" in matcher.error and len(matcher.error) < 200


LANGUAGES = [
    ({"regex": "[0-9]+"}, b"17"),
    ({"choice": ("1a", "1b")}, b"1a"),
    ({"json_schema": {"const": 1}}, b"1"),
    ({"grammar": 'start: "1" "a"'}, b"1a"),
    ({"grammar": 'root ::= "1" "a"'}, b"1a"),
]


@pytest.mark.parametrize(("language", "text"), LANGUAGES)
def test_a_language_begins_after_the_reasoning(
    compiler: ConstraintCompiler, language: dict[str, Any], text: bytes
) -> None:
    begun = Constraint(**language, reasoning_end="</t>")
    anything = allowed(compiler, begun)
    assert {*b"x1</t>{", 261} <= anything and EOS not in anything
    assert allowed(compiler, begun, b"1</x></t") >= {*b"x>"} and EOS not in allowed(compiler, begun, b"1")
    after = allowed(compiler, begun, b"Hm. </t>")
    assert after == {text[0], *b" \t\r\n"} | ({*b"0123456789"} if "regex" in language else set())
    assert EOS in allowed(compiler, begun, b"Hm. </t>\n\n" + text)
    assert ord("x") not in allowed(compiler, begun, b"Hm. </t>" + text)
    # The reasoning is optional if the model itself begins it.
    optional = Constraint(**language, reasoning_begin="<t>", reasoning_end="</t>")
    assert allowed(compiler, optional) == after | {ord("<")}
    assert EOS in allowed(compiler, optional, text)
    assert allowed(compiler, optional, b"<t") == {ord(">")}
    assert EOS in allowed(compiler, optional, b"\n<t>Hm.</t>" + text)


def test_special_tokens_mark_reasoning(compiler: ConstraintCompiler) -> None:
    begin, end = 258, 259
    marked = Constraint(regex="[0-9]+", reasoning_end="<|assistant|>")
    assert end in allowed(compiler, marked) and begin not in allowed(compiler, marked)
    assert allowed(compiler, marked, bytes([120])) >= {end, *b"x1"}
    matcher = compiler.matcher(Constraint(regex="1", reasoning_begin="<|user|>", reasoning_end="<|assistant|>"))
    for token, expected in ((begin, {begin, *b"1 \t\r\n"}), (end, None), (ord("1"), {*b"1 \t\r\n"}), (EOS, {EOS})):
        (mask,) = compiler.masks([matcher])
        found = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        assert token in found and expected in (None, found)
        matcher.advance(token)


def test_languages_are_refused_before_the_reasoning(compiler: ConstraintCompiler) -> None:
    for language in ({"regex": r"[^\s\S]"}, {"json_schema": {"type": "text"}}, {"grammar": "start: missing"}):
        with pytest.raises(GenerationError, match="cannot be compiled"):
            compiler.matcher(Constraint(**language, reasoning_end="</t>"))
    for fields in ({"reasoning_begin": "<t>"}, {"reasoning_end": ""}):
        with pytest.raises(GenerationError, match="needs a reasoning_end, and neither may be empty"):
            Constraint(regex="a", **fields)
