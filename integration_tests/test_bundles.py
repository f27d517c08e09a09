"""Bundles that are opened elsewhere: without the packages that made the model, and under another jax."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stack_core.abi.model_formats import open_for_generation
from stack_core.cli import main

CONFIG = """
model: {name: llama, vocab_size: 280, layers: 1, embed: 16, heads: 2, mlp: 32, max_positions: 64}
data: {source: "text:text.txt", seq_tokens: 16, batch_size: 2, validation_fraction: 0}
optimizer: {name: adamw}
run: {steps: 1}
"""
ROOT = Path(__file__).parents[1]
DIGITS = ROOT / "packages/serve/tests/bundle"
OPEN = """
import json, sys
import numpy as np
from stack_serve import bundle
found = bundle.load("scorer")({"tokens": np.array(json.loads(sys.argv[1]), "i4")})["logprobs"]
foreign = {"flax", "optax", "orbax", "stack_train", "stack_kernels"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps([found.tolist(), sorted(foreign)]))
"""
# Writes a bundle into the first folder named, and opens what is in all of them.
WRITE_AND_OPEN = """
import sys
from pathlib import Path
import jax
import numpy as np
from digits import export, images, params, predict
from stack_serve import bundle
own, *others = map(Path, sys.argv[1:])
export(own)
for directory in (own, *others):
    found = bundle.load(directory)({"pixels": images(11)})["probabilities"]
    np.testing.assert_allclose(found, predict(params(), images(11))["probabilities"], rtol=1e-5, atol=1e-6)
print(jax.__version__, *(bundle.load(directory).manifest.jax for directory in others))
"""


def test_a_run_exports_its_scoring_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)
    Path("text.txt").write_text("def main():\n    return 'one two buckle my shoe'\n" * 40)
    sizes = ("--batch", "2", "--seq", "12", "--licence", "Apache-2.0")
    for command in (
        ["train", "run.yaml", "--output", "run"],
        ["export", "run", "scorer", *sizes],
        ["bundle", "verify", "scorer"],
        ["export", "run", "longest", "--batch", "1", "--licence", "Apache-2.0"],  # fewer positions than the default
    ):
        main(command)
    assert "stack: scorer: 1 program in scorer" in capsys.readouterr().err
    (longest,) = json.loads((tmp_path / "longest/manifest.json").read_text())["programs"]
    assert longest["sizes"] == {"batch": 1, "seq": 64}
    for size in ("--batch=0", "--batch=-1", "--seq=0", "--seq=1000000", "--empty-batch"):
        with pytest.raises(SystemExit):
            main(["export", "run", "none", "--licence", "Apache-2.0", size])
        assert "takes 1 to" in capsys.readouterr().err
    tokens = np.random.default_rng(0).integers(280, size=(3, 9), dtype="i4")
    command = [sys.executable, "-c", OPEN, json.dumps(tokens.tolist())]
    opened = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    manifest = json.loads((tmp_path / "scorer/manifest.json").read_text())
    assert [program["custom_calls"] for program in manifest["programs"]] == [[]]  # stack-kernels would add its own
    found, foreign = json.loads(opened.stdout)
    assert foreign == []
    np.testing.assert_allclose(found, _logprobs(tmp_path / "run", tokens), atol=1e-4)


@pytest.mark.slow
def test_bundles_open_under_every_supported_jax_whichever_wrote_them(tmp_path: Path) -> None:
    pythons = _environments(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(DIGITS), "JAX_PLATFORMS": "cpu"}
    stored = DIGITS / "stored/digits"
    versions: list[str] = []
    for _ in range(2):  # in the second round each finds what all the others have written
        versions = []
        for python, folder in pythons.items():
            others = [each / "digits" for each in pythons.values() if each != folder and (each / "digits").exists()]
            shutil.rmtree(folder / "digits", ignore_errors=True)
            command = [python, "-W", "error", "-c", WRITE_AND_OPEN, folder / "digits", stored, *others]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            wrote, *opened = done.stdout.split()
            assert len(opened) == 1 + len(others)
            versions.append(wrote)
    assert len(set(versions)) == 3, versions


def _environments(folder: Path) -> dict[Path, Path]:
    """An interpreter of each supported Python, with its jax and what a user of bundles installs; a folder for each."""
    uv = str(Path(sys.executable).with_name("uv"))
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    pythons: dict[Path, Path] = {}
    for constraints in sorted((ROOT / "constraints").glob("py*.txt")):
        version = constraints.stem.replace("py3", "3.")
        home = folder / version
        make = [uv, "venv", "--quiet", f"--python={version}", home / "environment"]
        if subprocess.run(make, env=environment, check=False, capture_output=True).returncode:
            pytest.skip(f"needs Python {version}, with its jax, on the path")
        python = home / "environment/bin/python"
        wanted = [ROOT / "packages/core", ROOT / "packages/serve"]
        install = [uv, "pip", "install", "--quiet", f"--python={python}", f"--constraints={constraints}", *wanted]
        subprocess.run(install, env=environment, check=True)
        pythons[python] = home
    return pythons


def _logprobs(run: Path, tokens: np.ndarray) -> np.ndarray:
    checkpoint = open_for_generation(str(run))
    model = checkpoint.model(checkpoint.load_params())
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = model.logits(model(jnp.asarray(tokens), positions).hidden)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    return np.pad(np.asarray(logprobs), ((0, 0), (1, 0)))
