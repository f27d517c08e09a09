"""Wrong command lines and configs get one answer that names the fix: no traceback, and exit status 2.

`wrong_inputs.txt` lists them. By default every eighth is tried, and all before a release.
"""

import re
import shlex
from pathlib import Path

import pytest

from stack_core.cli import main

LINES = [line for line in Path(__file__).with_name("wrong_inputs.txt").read_text().splitlines() if line[:1] != "#"]
FILES = {
    "good.yaml": """
output: runs/new
model: {name: llama, vocab_size: 280, layers: 1, embed: 16, heads: 2, mlp: 32, max_positions: 64}
data: {source: "text:notes.txt", seq_tokens: 16, batch_size: 2, validation_fraction: 0}
run: {steps: 1}
""",
    "notes.txt": "one two buckle my shoe, three four knock at the door\n" * 40,
    "twice.yaml": "output: a\noutput: b\n",
    "list.yaml": "- output\n",
    "broken.yaml": "output: [a\n",
    "nooutput.yaml": "model: {name: llama, vocab_size: 280, layers: 1, embed: 16, heads: 2, mlp: 32}\n",
    "nomodel.yaml": "output: a\n",
    "number.yaml": "output: a\nmodel: 3\n",
    "tabs.yaml": "output: a\nmodel:\n\tname: llama\n",
    "object.yaml": "output: !!python/object:os.system x\n",
    "binary.yaml": "\0\1",
}
# A message names the fix by an imperative, a list of what is known, the expected form, or the command to run.
FIX = re.compile(
    r"did you mean|known:|registered:|expected|choose|set |give |use |write |install|run `|`stack|names? one of|has: |"
    r"is missing|available|commands? |should be|omit|leave|add |must |correct|recipes: |formats|start |such as|"
    r"requires|choices|remove|keep one|raise |lower |would fit|at least|targets: |one of|which starts with|divide|"
    r"name |has one|pass |change ",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with the files that the lines name, and a trained run."""
    folder = tmp_path_factory.mktemp("wrong")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        main(["train", "good.yaml", "--output", "runs/good"])
        yield folder


def test_there_are_two_hundred():
    assert len(set(LINES)) == len(LINES) >= 200


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[] if n % 8 == 0 else pytest.mark.slow) for n, line in enumerate(LINES)]
)
def test_a_wrong_line_is_answered_with_its_fix(line, folder, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(shlex.split(line))
    error = capsys.readouterr().err
    assert left.value.code == 2, error
    assert "Traceback" not in error
    answers = [row for row in error.splitlines() if row.startswith("stack: error: ")]
    assert len(answers) == 1, error
    assert len(error[error.index(answers[0]) :].removeprefix("stack: error: ")) > 20
    assert FIX.search(error[error.index(answers[0]) :]), error
