"""Tables on the terminal fit its width: numbers stay whole, long names keep their ends, missing columns are named."""

import html
import io
import json
import re
from dataclasses import dataclass

import pytest
from rich.console import Console

from stack_core.abi.plugins import registries
from stack_core.report.fields import number
from stack_profile.answer import Answer, present
from stack_profile.answer_table import fitted_lines
from stack_profile.commands import printing
from stack_profile.traces.short_paths import short_paths

WIDTH = 110


def printed(answer, width, shorten=str, limit=20):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    for part in present(answer, limit, shorten, width):
        console.print(part, markup=False)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("name", registries.analyses.names())
@pytest.mark.parametrize("which", ["trace", "tpu_trace"])
def test_every_analysis_fits_110_columns(request, name, which):
    trace = request.getfixturevalue(which)
    answer = registries.analyses[name](trace)
    lines = printed(answer, WIDTH, short_paths(trace).text)
    assert max(map(len, lines)) <= WIDTH
    said = " ".join(lines)
    words = set(said.split())
    for row in answer.rows[:20]:
        for field in answer.columns[:4]:
            value = getattr(row, field)
            if isinstance(value, int | float):
                assert set(number(field, value).split()) <= words, (field, value)


@dataclass(frozen=True)
class Row:
    name: str
    self_s: float
    busy_share: float
    forward_s: float
    line: str


NAME, LINE = "jit_step: a_fusion_with_a_very_long_name", "src/model/layers/attention/heads.py:1234"
ROWS = tuple(Row(f"{NAME}.{place}", 1.5e-3, 0.25, 2e-3, LINE) for place in (17, 18))


def test_long_names_keep_the_end_that_tells_them_apart():
    lines = printed(Answer("some", {}, Row, ROWS), 70)
    assert max(map(len, lines)) <= 70
    assert [line.split()[0][-3:] for line in lines[-2:]] == [".17", ".18"]
    assert all("…" in line and line.rstrip().endswith(".py:1234") for line in lines[-2:])


def test_columns_that_do_not_fit_are_named():
    lines = printed(Answer("some", {}, Row, ROWS), 40)
    assert max(map(len, lines)) <= 40
    said = " ".join(lines)
    assert "forward" in said.partition("... and")[2] and "too narrow" in said
    assert all("1.5 ms" in line for line in lines if ".17" in line or ".18" in line)


def test_facts_break_between_facts():
    found = fitted_lines(["busy: 1.5 ms", "idle: 2 ms", "steps: 3"], 24)
    assert found == "busy: 1.5 ms,\nidle: 2 ms, steps: 3"
    assert fitted_lines(["busy: 1.5 ms", "idle: 2 ms"], None) == "busy: 1.5 ms, idle: 2 ms"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("output", "widest"), [(Terminal, 60), (io.StringIO, 400)])
def test_only_a_terminal_limits_the_width(monkeypatch, output, widest):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(printing.sys, "stdout", output())
    printing.show(Answer("some", {}, Row, ROWS), limit=20)
    lines = re.sub("\x1b[^m]*m", "", printing.sys.stdout.getvalue()).splitlines()
    assert max(map(len, lines)) <= widest
    assert any("a_fusion_with_a_very_long_name.17" in line for line in lines) == (widest == 400)


def test_a_file_has_long_texts_whole_and_numbers_with_their_units(monkeypatch):
    sentence = "a sentence of evidence, which is long " * 10
    rows = (Row(NAME, 1.5e-3, 0.25, 2e-3, sentence), Row(sentence, 1.5e-3, 0.25, 2e-3, LINE))
    monkeypatch.setattr(printing.sys, "stdout", io.StringIO())
    printing.show(Answer("some", {}, Row, rows), limit=20)
    lines = printing.sys.stdout.getvalue().splitlines()
    assert sum("1.5 ms" in line for line in lines) == 2
    assert sum(sentence.rstrip() in line for line in lines) == 2


def test_an_answer_is_html_in_a_notebook():
    frame = Answer("some", {"busy_s": 0.5}, Row, (Row("<b>", 1.0, 0.5, 0.0, ""),), ("a note",))._repr_html_()
    page = html.unescape(frame)
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert "500 ms" in page and "a note" in page and "50.0%" in page
    assert "<style>" in page  # without it, plots are black


def test_an_answer_prints_as_its_command_does(monkeypatch):
    answer = Answer("some", {"busy_s": 0.5}, Row, ROWS * 15, ("a note",))
    monkeypatch.setattr(printing.sys, "stdout", io.StringIO())
    printing.show(answer, limit=20)
    assert str(answer).split() == printing.sys.stdout.getvalue().split()
    assert repr(answer) == "<Answer of some: 30 rows of name, self_s, busy_share, forward_s, line>"


def test_all_commands_print_json(captured, tmp_path, capsys):
    from stack_profile.commands.profile import export
    from stack_profile.commands.report import report

    report(captured, out=tmp_path / "report.html", json=True)
    said = json.loads(capsys.readouterr().out)
    assert said == {
        "report": f"{tmp_path}/report.html",
        "bytes": (tmp_path / "report.html").stat().st_size,
        "failures": {},
    }
    export(captured, to="csv", output=tmp_path / "out.csv", json=True)
    assert json.loads(capsys.readouterr().out)["bytes"] == (tmp_path / "out.csv").stat().st_size
    with pytest.raises(Exception, match="--output, which is missing"):
        export(captured, to="csv", json=True)
