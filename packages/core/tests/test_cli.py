"""The `stack` command as a user meets it: in a process of its own."""

import json
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import pytest
from cyclopts import Parameter

from stack_core import cli, command_names
from stack_core.abi.errors import ConfigError, HardwareError
from stack_core.abi.ops import ABI_MAJOR, ABI_MINOR
from stack_core.abi.registry import Entry, Registry
from stack_core.cli import overrides_from
from stack_core.commands.plugins import plugins as list_plugins


def stack(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "stack_core", *arguments], check=False, capture_output=True, text=True, timeout=120
    )


def test_help_lists_commands_without_importing_jax():
    code = (
        "import sys; from stack_core.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print('jax' in sys.modules, 'pydantic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert "plugins" in done.stdout
    assert done.stdout.rstrip().endswith("False False")


def test_importing_core_is_pure_and_brings_no_jax():
    code = (
        "import sys, stack_core; print(sorted(m for m in ('jax', 'pydantic', 'rich', 'cyclopts') if m in sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True).stdout.strip() == "[]"
    )


def test_plugins_as_json():
    done = stack("plugins", "--json")
    answer = json.loads(done.stdout)
    reports = {report["name"]: report for report in answer["plugins"]}
    assert (done.returncode, done.stderr, answer["problems"]) == (0, "", [])
    assert answer["abi"] == f"{ABI_MAJOR}.{ABI_MINOR}"
    assert "attention/reference" in reports["core"]["registered"]["ops"]


def test_plugins_as_lines():
    lines = stack("plugins").stdout.splitlines()
    assert any(line.startswith("core: stack-core ") and line.endswith(", loaded") for line in lines)
    assert any(line.startswith("    ops: attention/reference, ") for line in lines)


def test_lines_fit_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    list_plugins()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.startswith("      ") for line in lines), "names that go on in the next line"


def test_a_variable_that_blocks_nothing_is_noted_once(monkeypatch):
    monkeypatch.setenv("STACK_DISABLE_PLUGINS", "no_such_plugin")
    note = "STACK_DISABLE_PLUGINS names 'no_such_plugin'"
    assert stack("--help").stderr.count(note) == 1
    listed = stack("plugins")
    assert (listed.stdout + listed.stderr).count(note) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plugns",), "Did you mean 'plugins'"),
        (("plugins", "--jsn"), "--jsn"),
    ],
)
def test_wrong_usage_exits_with_2_and_suggests(arguments, message):
    done = stack(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def ops_command(op: str = "all", *, rounds: int | None = None, sizes: tuple[int, ...] = (), share: float = 0.0):
    """Measure ops."""
    sys.stdout.write(f"measured {op}" + (f" {rounds} {sizes} {share}" if sizes else "") + "\n")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `stack` in this process with commands of these names; returns exit status, stdout and stderr."""

    def with_commands(*names):
        entries = {name: Entry(name, ops_command, "acme", {"help": f"Help of {name}."}) for name in names}
        registry = Registry("commands", lambda: (entries, {}))
        for module in (cli, command_names):
            monkeypatch.setattr(module, "registries", types.SimpleNamespace(commands=registry))

        def stack(*arguments):
            try:
                cli.main(arguments)
                status = 0
            except SystemExit as error:
                status = error.code
            return (status, *capsys.readouterr())

        return stack

    return with_commands


def test_packages_share_the_first_word_of_their_commands(run):
    stack = run("bench ops", "bench serve", "benchmark", "tune")
    assert stack("bench", "ops", "--op", "norm") == (0, "measured norm\n", "")
    assert stack("benchmark") == (0, "measured all\n", "")
    listed = stack("--help")[1]
    assert listed.count("bench ") == 1, "the group is one line"
    assert "A group of commands: ops, serve." in listed
    group = stack("bench")[1]
    assert "Help of bench ops." in group and "Help of bench serve." in group


def test_a_fraction_is_no_integer(run):
    stack = run("tune")
    numbers = ("--rounds", "2.0", "--sizes", "3", "--sizes", "0x10", "--share", "1.5")
    assert stack("tune", *numbers) == (0, "measured all 2 (3, 16) 1.5\n", "")
    for numbers in (("--rounds", "1.5"), ("--sizes", "3", "--sizes", "1.5"), ("--rounds", "inf"), ("--rounds", "nan")):
        status, _, error = stack("tune", *numbers)
        assert status == 2 and f"{numbers[-1]!r} is not a whole number" in error


def test_options_that_are_paths_are_resolved(monkeypatch, capsys, tmp_path):
    def paths_command(*, out: Path | None = None, merge: Annotated[list[Path] | None, Parameter(negative=())] = None):
        """Show paths."""
        sys.stdout.write(f"{out} {[str(path) for path in merge or ()]}")

    entries = {"paths": Entry("paths", paths_command, "acme", {"help": "Show paths."})}
    monkeypatch.setattr(cli, "registries", types.SimpleNamespace(commands=Registry("commands", lambda: (entries, {}))))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    cli.main(["paths", "--out", "../a", "--merge", "../b", "--merge", "c"])
    assert capsys.readouterr().out == f"{tmp_path / 'a'} ['{tmp_path / 'b'}', 'c']"
    for option in ("--out", "--merge"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["paths", option, "gs://bucket/x"])
        assert "'gs://bucket/x' is an address of remote storage" in capsys.readouterr().err


def test_a_group_of_many_commands_names_the_first(run):
    listed = run(*(f"bench {word}" for word in "abcdef"))("--help")[1]
    assert "A group of commands: a, b, c, d and 2 more." in listed


def test_a_commands_own_help_is_its_docstring(run):
    stack = run("bench ops", "tune")
    for command in (("bench", "ops"), ("tune",)):
        own = stack(*command, "--help")[1]
        assert "Measure ops." in own and "Help of" not in own
    assert "Help of tune." in stack("--help")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("bench", "opz"), "Unknown name 'bench opz' among commands. Did you mean 'bench ops'"),
        (("bench", "opz"), "? `stack bench --help` lists all.\n"),
        (("bench", "ops", "some", "more", "x"), "Unexpected 'more', 'x': `stack bench ops` takes [OP] and options.\n"),
        (("bench", "ops", "--opp", "x"), "Run `stack bench ops --help`."),
        (("bench", "--opp"), "Run `stack bench --help`."),
        (("bensh", "ops"), "Unknown name 'bensh' among commands. Did you mean 'bench'"),
    ],
)
def test_wrong_usage_of_a_group_exits_with_2_and_says_what_is_right(run, arguments, message):
    status, printed, said = run("bench ops", "bench serve")(*arguments)
    assert (status, printed) == (2, "")
    assert message in said


def test_a_command_with_the_name_of_a_group_is_left_out(run):
    stack = run("bench", "bench ops")
    status, printed, said = stack("bench", "ops")
    assert (status, printed) == (0, "measured all\n")
    assert "command 'bench' of plugin 'acme' is left out: other commands begin with its name" in said


def test_completion_knows_commands_and_their_options(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))  # whose .bashrc loads the script
    cli.main(["--install-completion", "--shell", "bash", "--output", str(tmp_path / "stack.bash")])
    script = (tmp_path / "stack.bash").read_text()
    assert '"explain" "keys" "schema" "show"' in script and '"--command" "--json"' in script
    assert str(tmp_path / "stack.bash") in (tmp_path / ".bashrc").read_text()


def test_overrides_take_both_spellings():
    assert overrides_from(["--a.b", "3", "--c=d=e"]) == ["a.b=3", "c=d=e"]


@pytest.mark.parametrize("tokens", [["a.b"], ["--a.b"], ["--a", "1", "b"]])
def test_malformed_overrides_are_refused(tokens):
    with pytest.raises(ConfigError):
        overrides_from(tokens)


def test_files_of_an_expanded_pattern_are_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.md").touch()
    with pytest.raises(ConfigError, match=r"'b.md'; .* The shell expands patterns: put them in quotes\.$"):
        overrides_from(["--data.source", "a.md", "b.md"])


def test_a_warning_of_a_command_is_one_line():
    with cli._warnings_in_one_line():
        ours, theirs = (
            warnings.formatwarning("Rename it.", FutureWarning, f"/site/{file}", 3)
            for file in ("stack_core/abi/config.py", "jax/core.py")
        )
    assert ours == "stack: warning: Rename it.\n"
    assert theirs.startswith("/site/jax/core.py:3: FutureWarning: Rename it.")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        ("CUDA driver version is insufficient for CUDA runtime version", "The NVIDIA driver is too old for JAX's CUDA"),
        ("CUDA_ERROR_OUT_OF_MEMORY: out of memory", "The device has no memory left"),
    ],
)
def test_a_device_that_does_not_start_is_one_line(error, problem):
    with pytest.raises(HardwareError, match=rf"^{problem}: [^\n]*{error}[^\n]*$"), cli._explaining_devices():
        raise RuntimeError(f"Unable to initialize backend 'cuda': {error}")


def test_memory_that_runs_out_is_one_line_and_a_plugins_error_stays():
    with pytest.raises(HardwareError, match=r"^The device has no memory left: [^\n]*$"), cli._explaining_devices():
        jax.jit(lambda: jnp.zeros(2**50)).lower().compile()()
    with pytest.raises(RuntimeError, match=r"^Out of memory$"), cli._explaining_devices():
        raise RuntimeError("Out of memory")
