"""The Python in the READMEs runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{number}")
    for path in [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE))
]
# Those that speak of a run find it where the commands of the main README put it.
RUN = "runs/mine"
TRAIN = """
model: {family: llama, vocab_size: 300, layers: 1, embed: 16, heads: 2, mlp: 32, max_positions: 64}
data: {source: stdlib, seq_tokens: 16, batch_size: 2}
optimizer: {name: adamw}
run: {steps: 1}
"""


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs(block: str, tmp_path: Path) -> None:
    if RUN in block:
        (tmp_path / "run.yaml").write_text(TRAIN)
        train = [sys.executable, "-m", "stack_core.cli", "train", "run.yaml", "--output", RUN]
        subprocess.run(train, cwd=tmp_path, check=True)
    command = [sys.executable, "-W", "error", "-c", block]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
