"""A small GLM with a multi-token prediction layer, trained on the text of the standard library."""

import shutil
import sys
from pathlib import Path

from peers import peer

__all__ = ["write_mtp_run"]

# The layer that predicts ahead is a mixture, as in GLM-4.5; the others are dense.
_CONFIG = """
model:
  name: glm4_moe
  vocab_size: 4096
  layers: 8
  dense_layers: 8
  embed: 256
  heads: 4
  kv_heads: 2
  mlp: 704
  experts: 2
  active_experts: 1
  expert_mlp: 352
  mtp_layers: 1
  max_positions: 1024

data:
  source: stdlib
  seq_tokens: 128
  batch_size: 16

objective:
  mtp_loss: 0.3

optimizer:
  name: adamw
  learning_rate: 2.0e-3
  schedule: {warmup_steps: 30, decay: cosine, final_fraction: 0.1}

run:
  steps: 300

checkpoint:
  every_steps: 300
"""


def write_mtp_run(folder: Path) -> Path:
    """Returns the run of the model; trains it if it is not there, which takes about two minutes on two cores."""
    run = folder / "mtp"
    if not run.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config, partial = folder / "mtp.yaml", folder / "mtp.part"
        config.write_text(_CONFIG)
        shutil.rmtree(partial, ignore_errors=True)
        peer.run_quietly(Path(sys.executable).with_name("stack"), "train", config, "--output", partial)
        partial.rename(run)
    return run
