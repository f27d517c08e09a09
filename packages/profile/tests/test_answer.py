"""Answers read alike in all their forms."""

import io
import json
import re
import sys
from dataclasses import dataclass

import pytest
from rich.console import Console

from stack_core.abi.installing import install_command
from stack_profile.answer import Answer, present
from stack_profile.errors import ProfileError


@dataclass(frozen=True)
class Row:
    name: str
    self_s: float
    busy_share: float
    size_bytes: int | None = None


ANSWER = Answer(
    "test", {"busy_s": 0.5, "peak_flops": {"float32": 2e11}}, Row, (Row("a", 0.25, 0.5), Row("", 0.0, 0.0)), ("a note",)
)


def shown(answer, limit=None):
    out = io.StringIO()
    console = Console(file=out, width=100)
    for part in present(answer, limit):
        console.print(part)
    return out.getvalue()


def test_json_holds_everything():
    assert json.loads(json.dumps(ANSWER.as_mapping())) == {
        "analysis": "test",
        "facts": {"busy_s": 0.5, "peak_flops": {"float32": 2e11}},
        "rows": [
            {"name": "a", "self_s": 0.25, "busy_share": 0.5, "size_bytes": None},
            {"name": "", "self_s": 0.0, "busy_share": 0.0, "size_bytes": None},
        ],
        "notes": ["a note"],
    }


def test_a_terminal_shows_facts_rows_what_is_left_out_and_notes():
    text = shown(ANSWER)
    assert "busy: 500 ms, peak FLOPs: float32 200 G" in text
    assert "% of busy" in text and "50.0%" in text and "(none)" in text and "note: a note" in text
    assert "size" not in text  # nothing is known of it
    assert "1 more rows" in shown(ANSWER, limit=1)
    assert "No rows" in shown(Answer("test", {}, Row, (), ()))


def test_pandas_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ProfileError, match=re.escape(install_command("stack-profile[pandas]"))):
        ANSWER.as_pandas()


def test_pandas_has_the_columns_of_the_rows():
    pandas = pytest.importorskip("pandas", reason="needs stack-profile[pandas]")
    frame = ANSWER.as_pandas()
    assert isinstance(frame, pandas.DataFrame) and list(frame.columns) == ["name", "self_s", "busy_share", "size_bytes"]
    assert list(Answer("test", {}, Row, ()).as_pandas().columns) == list(frame.columns)
