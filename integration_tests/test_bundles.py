"""A model that stack-train made, exported, and opened by a process without it."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from stack_core.model_formats import open_for_generation

CONFIG = """
model: {family: llama, vocab_size: 300, layers: 1, embed: 16, heads: 2, mlp: 32, max_positions: 64}
data: {source: stdlib, seq_tokens: 16, batch_size: 2}
optimizer: {name: adamw}
run: {steps: 1}
"""
STACK = (sys.executable, "-m", "stack_core.cli")
OPEN = """
import json, sys
import numpy as np
from stack_serve import bundle
found = bundle.load("scorer")({"tokens": np.array(json.loads(sys.argv[1]), "i4")})["logprobs"]
foreign = {"flax", "optax", "orbax", "stack_train", "stack_kernels"} & {name.partition(".")[0] for name in sys.modules}
print(json.dumps([found.tolist(), sorted(foreign)]))
"""


def test_a_run_exports_its_scoring_function(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    sizes = ("--batch", "2", "--seq", "12", "--licence", "Apache-2.0")
    for command in (
        ("train", "run.yaml", "--output", "run"),
        ("export", "run", "scorer", *sizes),
        ("bundle", "verify", "scorer"),
    ):
        subprocess.run([*STACK, *command], cwd=tmp_path, check=True)
    tokens = np.random.default_rng(0).integers(300, size=(3, 9), dtype="i4")
    command = [sys.executable, "-c", OPEN, json.dumps(tokens.tolist())]
    opened = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    found, foreign = json.loads(opened.stdout)
    assert foreign == []
    np.testing.assert_allclose(found, _logprobs(tmp_path / "run", tokens), atol=1e-4)


def _logprobs(run: Path, tokens: np.ndarray) -> np.ndarray:
    checkpoint = open_for_generation(str(run))
    model = checkpoint.model(checkpoint.load_params())
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = model.logits(model(jnp.asarray(tokens), positions).hidden)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits)[:, :-1], tokens[:, 1:, None], axis=2)[..., 0]
    return np.pad(np.asarray(logprobs), ((0, 0), (1, 0)))
