"""Compiles a run's step with core's references alone, as `stack compile` does with kernels: what it takes without them.

    python benchmarks/step_of_references.py examples/published/llama3_8b.yaml --target v6e:4x4 --data.batch_size 32

The run is that one unless another is named; targets and overrides are those of `stack compile`.
"""

import sys
from pathlib import Path
from typing import Any

from stack_core import ops
from stack_core.abi.ops import TunedChoice
from stack_core.cli import main

_RUN = Path(__file__).parents[1] / "examples" / "published" / "llama3_8b.yaml"


class OnlyReferences:
    """A tuned table that always advises the reference."""

    def lookup(self, call: Any, chip: Any, *, candidates: Any, forward: Any = None) -> TunedChoice:
        return TunedChoice("reference", None, "to compare with")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    run = [] if arguments and not arguments[0].startswith("-") else [str(_RUN)]
    with ops.use_tuned_table(OnlyReferences()):
        main(["compile", *run, *arguments])
