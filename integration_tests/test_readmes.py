"""The Python in the READMEs and the docs runs, and their commands name options and keys that exist."""

import ast
import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stack_core import cli
from stack_core.abi.config import apply_overrides, load_yaml, parse
from stack_core.cli import main
from stack_core.command_names import command_name
from stack_train.run.config import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    for path in [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
}
NOTEBOOKS = {
    path.stem: "".join(re.findall(r"^```\{code-cell\} python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE))
    for path in sorted(ROOT.glob("docs/notebooks/*.md"))
    if path.stem != "index"
}


def shell_lines(text: str) -> list[str]:
    """The lines of the fenced shell blocks of a page that begin with `stack`."""
    fenced = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return re.findall(r"^(stack .*)$", "".join(fenced), re.MULTILINE)


COMMANDS = sorted(
    {
        command.strip(" &")
        for path in [
            *map(ROOT.joinpath, PAGES),
            *ROOT.glob("docs/notebooks/*.md"),
            ROOT / "examples" / "plugins" / "README.md",
        ]
        for text in [path.read_text().replace("\\\n", " ")]
        for line in [*re.findall(r"^ {4}(stack .*)$", text, re.MULTILINE), *shell_lines(text)]
        for command in line.split(" && ")
    }
)
app_of = functools.cache(cli._app)
RUN = "runs/mine"  # of the commands of the main README
MIGRATION = "docs/migration.md"  # its examples follow each other
TRAIN = """
model: {name: llama, vocab_size: 280, layers: 1, embed: 16, heads: 2, mlp: 32, max_positions: 128}
data: {source: "text:text.txt", seq_tokens: 16, batch_size: 2, validation_fraction: 0}
optimizer: {name: adamw}
run: {steps: 1}
"""
# Pages whose blocks run in one process, since starting it costs more than most blocks: those that train or serve a
# run, the page that starts processes, and all others. Each block has names, and each page a directory, of its own.
OF_RUNS = {"docs/start.md", *(f"packages/{name}/README.md" for name in ("train", "rl", "serve"))}
OF_PROCESSES = {"docs/runtime.md"}
OTHERS = set(PAGES) - OF_RUNS - OF_PROCESSES - {MIGRATION}
EACH = """
import json, os, sys
for page, blocks in json.loads(sys.argv[1]).items():
    os.chdir(page)
    for number, block in enumerate(blocks):
        sys.stderr.write(f"{page}, block {number}\\n")
        exec(compile(block, f"{page}, block {number}", "exec"), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the commands of the main README train, in the smallest size."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "run.yaml").write_text(TRAIN)
    (folder / "text.txt").write_text("def main():\n    return 'one two buckle my shoe'\n" * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        main(["train", "run.yaml", "--output", "mine"])
    return folder / "mine"


@pytest.mark.parametrize("pages", [OF_RUNS, OF_PROCESSES, OTHERS], ids=["runs", "processes", "others"])
def test_the_blocks_of_pages_run(pages: set[str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    blocks = {}
    for page in sorted(pages):
        folder = tmp_path / page
        folder.mkdir(parents=True)
        if RUN in "".join(PAGES[page]):
            (folder / RUN).parent.mkdir()
            (folder / RUN).symlink_to(request.getfixturevalue("run"))
        blocks[str(folder)] = PAGES[page]
    command = [sys.executable, "-W", "error", "-c", EACH, json.dumps(blocks)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_examples_of_the_migration_page_run_in_their_order(tmp_path: Path) -> None:
    interpreters = {"bash": ["bash", "-e", "-c"], "python": [sys.executable, "-W", "error", "-c"]}
    found = re.findall(r"^```(bash|python)\n(.*?)^```", (ROOT / MIGRATION).read_text(), re.DOTALL | re.MULTILINE)
    assert len(found) >= 8
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for language, block in found:
        command = [*interpreters[language], block]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_a_notebook_is_python_and_imports_names_that_exist() -> None:
    """The session `notebooks` runs them."""
    for notebook, cells in NOTEBOOKS.items():
        imports = [each for each in ast.parse(cells, notebook).body if isinstance(each, ast.Import | ast.ImportFrom)]
        assert imports, notebook
        exec(compile(ast.Module(imports, []), notebook, "exec"), {})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_has_its_options_and_a_documented_key_exists(command: str) -> None:
    tokens = shlex.split(command, comments=True)[1:]
    _, bound, *_ = app_of(command_name(tokens)).parse_args(tokens, exit_on_error=False, print_error=False)
    config = bound.arguments.get("config")
    if config is not None and (ROOT / config).is_file():
        mapping = apply_overrides(load_yaml(ROOT / config), cli.overrides_from(bound.arguments.get("overrides", ())))
        parse(RunConfig, {"model": {"name": "llama"}, **mapping})  # which may come from the run it starts from
