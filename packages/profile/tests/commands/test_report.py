"""`stack profile report` writes a page, of what can be read of a trace."""

import pytest

from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.cli import main
from stack_profile.traces.trace import trace_files


def test_a_report_is_written_and_nothing_beside_the_trace(captured, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in captured.rglob("*")}
    main(["profile", "report", str(captured), "--limit", "3"])
    assert capsys.readouterr().err == "stack: the report is 'report.html'.\n"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert '<section id="ops">' in (tmp_path / "report.html").read_text()
    assert {path: path.stat().st_mtime_ns for path in captured.rglob("*")} == before


def test_a_trace_that_is_cut_off_is_reported_as_far_as_it_goes(captured, tmp_path):
    (file,) = trace_files(captured)
    (tmp_path / "cut.xplane.pb").write_bytes(file.read_bytes()[: file.stat().st_size * 9 // 10])
    main(["profile", "report", str(tmp_path / "cut.xplane.pb"), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "This trace is partial" in page and page.count("<section") == len(registries.analyses.names())


def test_what_failed_is_named_on_the_terminal_too(captured, tmp_path, capsys, monkeypatch):
    entries = {"broken": Entry("broken", lambda trace: 1 / 0, "acme")}
    monkeypatch.setattr(registries, "analyses", Registry("analyses", lambda: (entries, {})), raising=False)
    main(["profile", "report", str(captured), "--out", str(tmp_path / "page.html")])
    assert "analysis 'broken' failed: ZeroDivisionError" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_an_error(captured, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["profile", "report", str(captured), "--out", str(tmp_path / "missing" / "page.html")])
    assert end.value.code == 2 and "cannot be written" in capsys.readouterr().err
