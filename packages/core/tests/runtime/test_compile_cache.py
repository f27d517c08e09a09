"""What one process compiled, the next one finds."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import jax
from stack_core.runtime.compile_cache import keep_compiled
keep_compiled()
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.jit(lambda x: x * 2 + 1)(jax.numpy.ones(7)).block_until_ready()
print("/jax/compilation_cache/cache_hits" in hits)
"""


def _run(cache: Path, program: str = PROGRAM, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    variables = {**inherited, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu", **environment}
    process = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert not process.stderr
    return process.stdout.strip()


def test_the_second_process_compiles_nothing_but_an_edit_that_moves_lines_compiles_again(tmp_path):
    assert _run(tmp_path) == "False"
    assert _run(tmp_path) == "True"
    assert list((tmp_path / "stack" / "compiled").rglob("*-cache"))
    assert _run(tmp_path, program="# a comment above\n" + PROGRAM) == "False"


def test_a_cache_that_was_chosen_is_left_alone(tmp_path):
    chosen = tmp_path / "chosen"
    _run(tmp_path, JAX_COMPILATION_CACHE_DIR=str(chosen))
    assert list(chosen.rglob("*-cache"))
    assert not (tmp_path / "stack").exists()


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path):
    file = tmp_path / "file"
    file.touch()
    assert _run(file) == "False"
