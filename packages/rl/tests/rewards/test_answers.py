"""Mathematical answers as values: equal however they are written, different, or not decided; never a false reward."""

import asyncio
import io
import json
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stack_rl.contracts import Completion
from stack_rl.rewards import math
from stack_rl.rewards.answers import extract, is_same
from stack_rl.rewards.expressions import plain
from stack_rl.rewards.math import MathConfig
from stack_rl.rewards.reading import read

from .answer_pairs import pairs

SAME = [
    ("1/2", "0.5"), (r"\frac{1}{2}", ".5"), (r"\dfrac12", "1/2"), ("1 1/2", "1.5"), (r"1\frac{1}{2}", "3/2"),
    ("-1 1/2", "-1.5"), ("50%", "0.5"), (r"50\%", "1/2"), ("1,000", "1000"), ("$1,234.50", "1234.5"), ("1e3", "1000"),
    ("5 cm", "0.05 m"), ("90 minutes", "1.5 hours"), ("2 km", "2000 m"), (r"5\text{ cm}", "5"), (r"90^\circ", "90"),
    (r"180^\circ", r"\pi"), ("x = 4", "4"), ("{1, 2}", r"\{2,1\}"), ("1, 2", "{2, 1, 1}"), ("(1, 2)", "(1.0,4/2)"),
    ("[0, 1)", r"\left[0,1\right)"), (r"(-\infty, 3]", "(-inf,3]"), (r"x \in [1,2]", "[1, 2]"), (r"\frac{3}{4}", "75%"),
    ("2x + 1", "2x+1"), ("Paris", "paris"), ("\N{MINUS SIGN}3", "-3"), (r"\boxed{7}"[7:-1], "7.0"), ("(1,2)", "(1, 2)"),
    ("{(1,2),(3,4)}", "{(3,4),(1,2)}"), ("10 / 4", "2.5"), ("5 inches", "12.7 cm"), ("y = 2x - 1", "2x - y = 1"),
    ("x < 3", "2x < 6"), ("3 > x", "x < 3"), (r"\pm 2", "-2, 2"), (r"\frac{x^2-1}{x-1}", "x+1"), ("(1+i)^2", "2i"),
    (r"2^{\frac12}", r"\sqrt 2"), (r"\sqrt{-4}", "2i"), (r"\sqrt{8x}", r"2\sqrt{2x}"), ("5!", "120"),
    ("no solution", r"\emptyset"),
    (r"12\text{ m}^2", "120000 square cm"), (r"\sin(2x)", r"\sin 2x"), ("24_{7}", "24_7"), (r"\binom{5}{2}", "10"),
]  # fmt: skip
OTHER = [
    ("1/2", "0.51"), ("50%", "50"), ("5 cm", "5 m"), ("5 cm", "5 kg"), ("{1, 2}", "{1, 3}"), ("(1, 2)", "(2, 1)"),
    ("[0, 1)", "[0, 1]"), ("[0, 1)", "(0, 1)"), ("{1, 2}", "(1, 2)"), ("5x", "5"), ("12", "1,2"), ("2 km", "2000"),
    ("(1, 2)", "[1, 2]"), ("{1}", "{1, 2}"), ("5", r"5\pi"), ("2", "2xy"), ("12", "12ab"), ("x=2,y=1", "x=1,y=2"),
    ("3, 100", "3100"), ("5", "5 or 6"), ("5", r"5\text{ or more}"), ("0.33333333333", "1/3"),
    ("24_7", "24"), ("x", "y"),
]  # fmt: skip
UNDECIDED = [
    ("", "0"), ("", ""), ("1/0", "0"), ("3", "three"), ("3 apples", "3"), ("5 m", "5"),
    (r"(0,1)\cup(2,3)", r"[0,1)\cup(2,3]"), ("A", "a"),
    ("5 6", "56"), ("1/2x", "x/2"), ("5-", "5"), ("5)", "5"), ("x > 5", "5"), ("1,000,00", "100000"), ("007", "7"),
    (r"5\text{ million}", "5"), ("12 cups", "12"), (r"\sin(x)^2", r"1-\cos(x)^2"), ("1000000", "1e66"),
    ("9^{9^{9}}", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("answers", "expected"), [(SAME, True), (OTHER, False), (UNDECIDED, None)])
def test_answers_are_the_same_others_or_not_decided(answers, expected):
    for pair in answers:
        for ours, theirs in (pair, pair[::-1]):
            assert is_same(ours, theirs) is expected, (ours, theirs, read(ours), read(theirs))


def test_no_pair_of_five_hundred_is_a_false_reward():
    suite = pairs()
    assert len(suite) >= 500 and sum(each.is_equal for each in suite) > 150
    rewarded = [each for each in suite if scored(each.answer, each.right) or is_same(each.right, each.answer)]
    assert rewarded == [each for each in suite if each.is_equal]


def scored(answer, right):
    text = rf"So it is \boxed{{{answer}}}."
    completion = Completion(prompt="?", text=text, tokens=(1,), is_finished=True, record={"answer": right})
    return asyncio.run(MathConfig(library="none").build()(completion)).value == 1.0


def test_math_verify_adds_no_false_reward(monkeypatch, capsys):
    pytest.importorskip("math_verify", reason="needs the extra `math`")
    undecided = [each for each in pairs() if is_same(each.answer, each.right) is None]
    assert len(undecided) > 50 and not any(each.is_equal for each in undecided)
    for ours, theirs, expected in [(each.answer, each.right, False) for each in undecided] + [
        (r"\log_2 8", "3", True), (r"\sin(\pi/6)", r"\frac12", True), (r"2^{x+1}", r"2 \cdot 2^x", True),
    ]:  # fmt: skip
        given_ = json.dumps({"ours": plain(ours), "theirs": plain(theirs)})
        monkeypatch.setattr("sys.stdin", io.StringIO(given_))
        exec(math._PROGRAM, {})  # as the sandbox does, a process for each answer, which takes seconds
        assert (capsys.readouterr().out.strip() == "same") is expected, (ours, theirs)


@pytest.mark.parametrize(
    ("answer", "right"), [(r"\infty-\infty", "0"), (r"\frac{\infty}{\infty}", "1"), (r"0\cdot\infty", "0")]
)
def test_arithmetic_with_infinity_has_no_value(answer, right):
    assert is_same(answer, right) is None
    assert not scored(answer, right)


def test_numbers_may_be_apart_by_the_tolerance_and_no_more():
    assert is_same("3.1416", "3.14159", tolerance=1e-5) and not is_same("3.1416", "3.14159", tolerance=1e-6)
    assert is_same("1.41421", r"\sqrt{2}", tolerance=1e-5) and is_same("1.41421", r"\sqrt{2}") is False
    assert not is_same("0.333", "1/3")


@given(st.fractions(max_denominator=999), st.integers(1, 6))
def test_a_fraction_is_its_value(value, times):
    top, bottom = value.numerator * times, value.denominator * times
    assert is_same(f"{top}/{bottom}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    assert is_same(f"{top + 1}/{bottom}", str(value)) is False


@settings(max_examples=40)
@given(st.integers(0, 10**9))
def test_an_expression_equals_itself_written_otherwise(seed):
    """Random expressions, and the same ones with sums and products turned around and factors of 1 put in."""
    random_ = random.Random(seed)

    def written(depth):
        if depth == 0:
            leaf = random_.choice(("x", "y", r"\pi", "i", "2", "3", "12", r"\sqrt{2}", r"\sqrt{6}", "0.25"))
            return leaf, leaf
        (a, a_other), (b, b_other) = written(depth - 1), written(depth - 1)
        match random_.choice("+*-^/"):
            case "+":
                return f"({a}) + ({b})", f"({b_other}) + ({a_other})"
            case "*":
                return f"({a})({b})", rf"({b_other}) \cdot ({a_other})"
            case "-":
                return f"({a}) - ({b})", f"-(({b_other}) - ({a_other}))"
            case "^":
                return f"({a})^2", f"({a_other})({a_other})"
        return rf"\frac{{{a}}}{{3}}", f"({a_other}) / 3"

    ours, theirs = written(3)
    same = is_same(ours, theirs)
    assert same or read(ours) is None
    assert is_same(f"({ours}) + 1", theirs) is not True


@example("(" * 5000 + "1,2" + ")" * 5000)
@example("9" * 100_000)
@example("1e999999999")
@example("-" * 900 + "x")
@example(r"\sin" * 200 + "x")
@example(r"(x+y+z)^{40}")
@example(r"\sqrt{99999999999999999999}")
@given(st.text(max_size=40) | st.text(r"\{}()[]^_+-*/=<,.;%$!|0123xyi fracsqrtpmcudox", max_size=40))
def test_any_text_can_be_read(text):
    read(text)
    extract(text)
    assert is_same(text, "12345.678") is not True


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("lots of steps\n#### 42\n", "42"),
        ("We see.\nThe answer is **7**.", "7"),
        ("The answer is: 5", "5"),
        ("The answer is : $5$.", "$5$"),
        ("**Answer:** 7 cm", "7 cm"),
        ("Final Answer: The final answer is $3$. I hope it is correct.", "$3$"),
        ("The answer is:\n-5\nwhich is odd", "-5"),
        ("The answer is", None),
        ("42", "42"),
        ("a long line that explains and names nothing", None),
        ("two\nlines", None),
        (r"cut off \boxed{3", None),
        ("", None),
    ],
)
def test_the_answer_is_found_in_a_text(text, answer):
    assert extract(text) == answer
