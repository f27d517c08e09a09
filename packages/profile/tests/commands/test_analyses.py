"""A function of a trace becomes a command, and one that cannot be is refused with what was expected."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from cyclopts import App

from stack_core.cli import main
from stack_profile.answer import Answer
from stack_profile.commands.analyses import command
from stack_profile.errors import ProfileError


@dataclass(frozen=True)
class OptionRow:
    name: str
    value: str


def options(
    trace, *, kind: Literal["a", "b"] = "a", limit_s: float = 0.5, deep: bool = False, file: Path | None = None
):
    """Show what it was given.

    Args:
      kind: one of two.
      file: a file.
    """
    given = {"kind": kind, "limit_s": limit_s, "deep": deep, "file": file}
    return Answer("options", {}, OptionRow, tuple(OptionRow(name, repr(value)) for name, value in given.items()))


@pytest.fixture
def run(captured, capsys):
    """Prints the answer of `options` about a trace."""
    app = App(result_action="return_value")
    app.command(command("options", options), name="options")

    def run(*tokens):
        app(["options", str(captured), *map(str, tokens)], exit_on_error=False)
        return capsys.readouterr().out

    return run


def test_options_have_the_types_and_defaults_of_the_function(run):
    def rows(*tokens):
        return {row["name"]: row["value"] for row in json.loads(run(*tokens, "--json"))["rows"]}

    assert rows() == {"kind": "'a'", "limit_s": "0.5", "deep": "False", "file": "None"}
    given = rows("--kind", "b", "--limit-s", "2", "--deep", "--file", "x.py")
    assert given == {"kind": "'b'", "limit_s": "2.0", "deep": "True", "file": repr(Path("x.py"))}


def test_help_is_the_docstring(run):
    text = run("--help")
    assert "Show what it was given." in text and "one of two. [choices: a, b]" in text and "rows to show" in text


def test_a_limit_is_the_commands(run):
    assert "2 more rows" in run("--limit", 2)


def misspelled(trace, *, by: "Grupping" = "op"):  # noqa: F821
    """Its options cannot be known."""


@pytest.mark.parametrize(
    "analysis",
    [
        pytest.param(lambda: None, id="no trace"),
        pytest.param(lambda trace, by="op": None, id="an option by position"),
        pytest.param(lambda trace, *, by: None, id="no default"),
        pytest.param(lambda trace, *, json=False: None, id="a name that is taken"),
        pytest.param(lambda trace, **options: None, id="any options"),
        pytest.param(misspelled, id="an annotation that means nothing"),
    ],
)
def test_what_cannot_be_a_command_says_what_was_expected(analysis):
    with pytest.raises(ProfileError, match=r"'mine'.*Expected `analysis\(trace, \*, option=default"):
        command("mine", analysis)


def test_help_of_all_commands_imports_neither_jax_nor_numpy():
    code = (
        "import sys; from stack_core.cli import main\n"
        "try: main(['profile', '--help'])\nexcept SystemExit: pass\n"
        "print([name for name in ('jax', 'numpy', 'stack_profile.analyses') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "roofline" in done.stdout and "Show where the devices' time went." in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_tables_name_files_from_the_working_directory_and_json_in_full(captured, trace, capsys):
    main(["profile", "ops", str(captured), "--by", "file", "--json"])
    full = json.loads(capsys.readouterr().out)["rows"][0]["name"]
    assert Path(full) == Path(__file__).parents[1] / "conftest.py"
    main(["profile", "ops", str(captured), "--by", "file"])
    table = capsys.readouterr().out
    assert full not in table
    assert str(Path(full).relative_to(trace.about["directory"])) in table.split()
