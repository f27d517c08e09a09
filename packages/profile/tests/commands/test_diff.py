"""`stack profile diff`, as people call it."""

import csv
import io
import json

import pytest

from stack_core.cli import main

TIMES = {"dot.1": [1000, 1010, 1020] * 4, "dot.2": [2000, 2020, 2010] * 4, "dot.3": [500] * 12, "dot.4": [1500] * 12}


@pytest.fixture
def traces(build, tmp_path):
    """Two traces before and two after, in which dot.2 is a tenth slower; of each side the second a little later."""
    for place, (name, factor) in enumerate((("a1", 1.0), ("b1", 1.1), ("a2", 1.0), ("b2", 1.1))):
        times = {**TIMES, "dot.2": [factor * time for time in TIMES["dot.2"]]}
        times = {op: [int(time) + place for time in column] for op, column in times.items()}
        (tmp_path / f"{name}.xplane.pb").write_bytes(build.steps(times))
    return {name: str(tmp_path / f"{name}.xplane.pb") for name in ("a1", "a2", "b1", "b2")}


def printed(capsys, *tokens):
    main(["profile", "diff", *tokens])
    return capsys.readouterr().out


def test_what_became_slower_is_named_first_in_every_form(capsys, traces):
    tokens = (traces["a1"], traces["b1"])
    answer = json.loads(printed(capsys, *tokens, "--json"))
    first = answer["rows"][0]
    assert (first["name"], first["verdict"]) == ("jit_step: dot.2", "slower")
    assert first["change_s"] == pytest.approx(0.0002, rel=0.01)
    assert next(csv.DictReader(io.StringIO(printed(capsys, *tokens, "--csv"))))["name"] == "jit_step: dot.2"
    assert "jit_step: dot.2" in printed(capsys, *tokens, "--limit", "1", "--by", "op")


def test_several_captures_a_side(capsys, traces):
    tokens = (traces["a1"], traces["b1"], "--a", traces["a2"], "--b", traces["b2"], "--json")
    answer = json.loads(printed(capsys, *tokens))
    assert answer["facts"]["captures"] == [2, 2]
    assert (answer["rows"][0]["name"], answer["rows"][0]["verdict"]) == ("jit_step: dot.2", "slower")


def test_a_change_below_the_least_is_not_named(capsys, traces):
    answer = json.loads(printed(capsys, traces["a1"], traces["b1"], "--min-change", "15%", "--json"))
    assert {row["verdict"] for row in answer["rows"]} <= {"not shown", "not known"}


@pytest.mark.parametrize("share", ["three", "3%%", "-3%", "nan"])
def test_what_is_no_share_is_said(capsys, traces, share):
    with pytest.raises(SystemExit) as end:
        main(["profile", "diff", traces["a1"], traces["b1"], f"--min-change={share}"])
    assert end.value.code == 2
    assert "is not a share. Write one as 3%" in capsys.readouterr().err
