"""Numbers with their units, and headings."""

import pytest

from stack_core.report.fields import number, title


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("self_s", 12.0, "12 s"),
        ("self_s", 0.0123, "12.3 ms"),
        ("self_s", 4.2e-7, "420 ns"),
        ("self_s", 0.0, "0"),
        ("self_s", None, "-"),
        ("size_bytes", 1536, "1.5 KiB"),
        ("rate_bytes_s", 3 * 2**30, "3 GiB"),
        ("rate_flops_s", 2.5e11, "250 G"),
        ("tokens_per_s", 12345.6, "12,346"),
        ("mfu", 0.4213, "42.1%"),
        ("flops", 0, "0"),
        ("busy_share", 0.125, "12.5%"),
        ("busy_share", 0.00001, "0.001%"),
        ("busy_share", 0, "0.0%"),
        ("occurrences", 12345, "12,345"),
        ("intensity", 61.234, "61.2"),
        ("intensity", 1234.5, "1,234"),
        ("why", "", "(none)"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(name, value, text):
    assert number(name, value) == text


def test_headings_say_what_shares_are_of():
    names = ("busy_share", "idle_step_share", "self_s", "rate_bytes_s", "rate_flops_s", "tokens_per_s", "runs_expected")
    assert [title(name) for name in names] == [
        "% of busy",
        "idle % of step",
        "self",
        "rate B/s",
        "rate FLOP/s",
        "tokens/s",
        "runs expected",
    ]
