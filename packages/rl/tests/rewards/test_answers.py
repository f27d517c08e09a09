"""Answers as values: what is the same however it is written, and what is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack_rl.rewards.answers import extracted, parsed, same_answer

SAME = [
    ("1/2", "0.5"), (r"\frac{1}{2}", ".5"), (r"\dfrac12", "1/2"), ("1 1/2", "1.5"), (r"1\frac{1}{2}", "3/2"),
    ("-1 1/2", "-1.5"), ("50%", "0.5"), (r"50\%", "1/2"), ("1,000", "1000"), ("$1,234.50", "1234.5"), ("1e3", "1000"),
    ("5 cm", "0.05 m"), ("90 minutes", "1.5 hours"), ("2 km", "2000 m"), (r"5\text{ cm}", "5"), (r"90^\circ", "90"),
    ("3 apples", "3"), ("x = 4", "4"), ("{1, 2}", r"\{2,1\}"), ("1, 2", "{2, 1, 1}"), ("(1, 2)", "(1.0,4/2)"),
    ("[0, 1)", r"\left[0,1\right)"), (r"(-\infty, 3]", "(-inf,3]"), (r"x \in [1,2]", "[1, 2]"), (r"\frac{3}{4}", "75%"),
    ("2x + 1", "2x+1"), ("Paris", "paris"), ("\N{MINUS SIGN}3", "-3"), (r"\boxed{7}"[7:-1], "7.0"), ("(1,2)", "(1, 2)"),
    ("{(1,2),(3,4)}", "{(3,4),(1,2)}"), ("10 / 4", "2.5"), ("5 inches", "12.7 cm"),
]  # fmt: skip
OTHER = [
    ("1/2", "0.51"), ("50%", "50"), ("5 cm", "5 m"), ("5 cm", "5 kg"), ("{1, 2}", "{1, 3}"), ("(1, 2)", "(2, 1)"),
    ("[0, 1)", "[0, 1]"), ("[0, 1)", "(0, 1)"), ("{1, 2}", "(1, 2)"), ("1/0", "0"), ("", "0"), ("5x", "5"),
    ("12", "1,2"), ("2 km", "2000"),
    ("1000000", "1e66"), ("(1, 2)", "[1, 2]"), ("{1}", "{1, 2}"), ("3", "three"),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "theirs"), SAME)
def test_the_same_value_in_another_way(ours, theirs):
    assert same_answer(ours, theirs) and same_answer(theirs, ours), (parsed(ours), parsed(theirs))


@pytest.mark.parametrize(("ours", "theirs"), OTHER)
def test_another_value(ours, theirs):
    assert not same_answer(ours, theirs) and not same_answer(theirs, ours), (parsed(ours), parsed(theirs))


def test_numbers_may_be_apart_by_the_tolerance_and_no_more():
    assert same_answer("3.1416", "3.14159", tolerance=1e-5) and not same_answer("3.1416", "3.14159", tolerance=1e-6)
    assert not same_answer("0.333", "1/3")


@given(st.fractions(max_denominator=999), st.integers(1, 6))
def test_a_fraction_is_its_value(value, times):
    top, bottom = value.numerator * times, value.denominator * times
    assert same_answer(f"{top}/{bottom}", rf"\frac{{{value.numerator}}}{{{value.denominator}}}")
    assert not same_answer(f"{top + 1}/{bottom}", str(value))


@given(st.text(max_size=40))
def test_any_text_can_be_read(text):
    assert parsed(text) is not None
    extracted(text)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{3} or rather \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("lots of steps\n#### 42\n", "42"),
        ("We see.\nThe answer is **7**.", "7"),
        ("Answer: 7 cm", "7 cm"),
        ("42", "42"),
        ("a long line that explains and names nothing", None),
        ("two\nlines", None),
        (r"cut off \boxed{3", None),
        ("", None),
    ],
)
def test_the_answer_is_found_in_a_text(text, answer):
    assert extracted(text) == answer


@pytest.mark.parametrize(("opening", "closing"), ["()", "[]", "{}"])
def test_brackets_beyond_all_measure_are_text(opening, closing):
    nested = f"{opening * 5000}1,2{closing * 5000}"
    assert parsed(nested) == nested


def test_numbers_of_a_million_digits_are_not_made():
    assert isinstance(parsed("1e999999999"), str) and isinstance(parsed("9" * 100_000), str)
