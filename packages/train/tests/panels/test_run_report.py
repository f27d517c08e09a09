"""The report has every panel that has something to show, names those that fail, and refers to nothing outside."""

import html
import re

import pytest

from stack_core.abi.errors import RunDirectoryError
from stack_core.abi.plugins import registries
from stack_core.abi.registry import Entry, Registry
from stack_core.abi.reports import Fragment
from stack_core.report.markup import element
from stack_train.commands.report import report
from stack_train.panels.run_report import write_report

HOSTILE = "<script src='//example.org'>&"


@pytest.fixture
def panels(monkeypatch):
    """Makes these functions the registered panels, in the order of their names' last digits if there are any."""

    def registered(**functions):
        orders = {name: {"order": int(name[-1])} if name[-1].isdigit() else {} for name in functions}
        entries = {name: Entry(name, function, "acme", orders[name]) for name, function in functions.items()}
        monkeypatch.setattr(registries, "panels", Registry("panels", lambda: (entries, {})), raising=False)

    return registered


def text_of(directory):
    return html.unescape(re.sub(r"<(?:wbr|/?\w[^<>]*)>", "", (directory / "report.html").read_text()))


def test_panels_stand_in_their_order_and_those_with_nothing_are_left_out(tmp_path, panels):
    def shown(directory, config):
        assert directory == tmp_path
        return Fragment(config["model"]["name"], element("p", "body"))

    panels(last=shown, second2=shown, first1=shown, nothing=lambda directory, config: None)
    assert write_report(tmp_path, {"model": {"name": "llama"}}) == ()
    document = (tmp_path / "report.html").read_text()
    assert re.findall(r'<section id="(\w+)">', document) == ["first1", "second2", "last"]
    assert document.count("<p>body</p>") == 3 and f"Run {tmp_path.name}" in document
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_a_panel_that_fails_is_named_and_costs_no_other(tmp_path, panels):
    def refusing(directory, config):
        raise RunDirectoryError("no metrics here")

    without_body = Fragment("wrong", "text")  # which no check of annotations sees
    object.__setattr__(without_body, "body", None)
    panels(
        broken=lambda directory, config: 1 / 0,
        refusing=refusing,
        text=lambda directory, config: "text",
        wrong=lambda directory, config: without_body,
        fine=lambda directory, config: Fragment("fine", element("p", "still here")),
    )
    broken, refused, text, wrong = write_report(tmp_path, {})
    assert broken.startswith("broken: ZeroDivisionError")
    assert (refused, text, wrong) == (
        "refusing: no metrics here",
        "text: it returned str; a panel returns a Fragment or None.",
        "wrong: its body is NoneType; the body of a Fragment is text.",
    )
    shown = text_of(tmp_path)
    assert "The panel 'broken' failed. ZeroDivisionError" in shown and "still here" in shown


def test_a_target_that_cannot_be_imported_is_a_panel_that_fails(tmp_path, panels):
    panels(absent="no_such_module:panel")
    assert "'absent' of plugin 'acme' cannot be loaded" in write_report(tmp_path, {})[0]


def test_nothing_is_loaded_and_no_text_becomes_markup(tmp_path, panels):
    panels(hostile=lambda directory, config: Fragment(HOSTILE, HOSTILE))
    write_report(tmp_path, {})
    document = (tmp_path / "report.html").read_text()
    assert "<script" not in document and "default-src 'none'" in html.unescape(document)
    assert set(re.findall(r'(?:href|src|action)="(.)', document)) == {"#"}
    assert "://" not in document and "@import" not in document and "url(" not in document


def test_a_report_that_cannot_be_written_says_so(tmp_path, panels):
    panels()
    with pytest.raises(RunDirectoryError, match=r"report\.html cannot be written"):
        write_report(tmp_path / "absent", {})


def test_the_command_reads_the_config_and_names_what_failed(tmp_path, panels, capsys):
    panels(
        family=lambda directory, config: Fragment("model", config["model"]["name"]),
        broken=lambda directory, config: 1 / 0,
    )
    with pytest.raises(RunDirectoryError, match="holds no run"):
        report(tmp_path)
    (tmp_path / "config.yaml").write_text("model: {name: llama}\n")
    report(tmp_path)
    assert "llama" in text_of(tmp_path)
    said = capsys.readouterr().err
    assert "broken: ZeroDivisionError" in said and "report.html" in said
