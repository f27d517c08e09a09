"""`stack losses RUN`: the training losses of a run as one line of bars."""

import json
from pathlib import Path

from stack_core.abi.errors import RunDirectoryError

BARS = "▁▂▃▄▅▆▇█"


def losses(run: Path) -> None:
    """Draw the training losses of a run, first to last.

    Args:
      run: the run's directory.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        raise RunDirectoryError(f"{path} does not exist. Name the output directory of a run of `stack train`.")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    values = [record["loss"] for record in records if record["kind"] == "train"]
    low, spread = min(values), max(values) - min(values)
    heights = [round((value - low) / spread * (len(BARS) - 1)) if spread else 0 for value in values]
    print("".join(BARS[height] for height in heights), f"{values[0]:.3f} to {values[-1]:.3f}")
