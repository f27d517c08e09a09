"""`stack train`: a config file and dotted overrides to a finished run."""

import dataclasses
import json as json_format
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from stack_core.cli import overrides_from
from stack_core.compile_cache import keep_compiled
from stack_core.config import apply_overrides, load_yaml, parse

__all__ = ["train"]


def train(
    config: Path,
    /,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True)],
    resume: Annotated[bool, Parameter(negative=())] = False,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Train a model: stack train run.yaml --trainer.steps 300 --model.layers 6

    SIGTERM saves and exits with status 0; Ctrl-C saves and exits with status 2.

    Args:
      config: YAML file of the run.
      overrides: --section.key VALUE, any number of them.
      resume: go on from the newest whole checkpoint of the run's directory.
      json: print the run's summary as JSON on standard output.
    """
    mapping = apply_overrides(load_yaml(config), overrides_from(overrides))
    from stack_train.config import RunConfig  # imports jax, which a mistyped file should not wait for
    from stack_train.run import train as run

    keep_compiled()
    summary = run(parse(RunConfig, mapping), resume=resume, terminal=sys.stderr.isatty())
    if json:
        print(json_format.dumps(dataclasses.asdict(summary), default=str))
