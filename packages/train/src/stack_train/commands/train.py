"""`stack train`: training from a config file with dotted overrides."""

import dataclasses
import json as json_format
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from stack_core.abi.config import apply_overrides, load_yaml
from stack_core.abi.errors import ConfigError
from stack_core.cli import overrides_from
from stack_core.runtime.compile_cache import keep_compiled
from stack_core.runtime.host_range import HostRange

__all__ = ["train"]

# The last panel of `stack train --help`.
_KEYS = Group(
    "Keys",
    sort_key=1,
    help="""Each key is an option: --section.key VALUE. `stack config keys` lists all. Those to know first:

- output: directory of the run
- run.steps: number of updates
- run.init_from: run or hf:DIR to start from
- run.evaluate_every_steps: interval of evaluations
- model.name: family of the model, of `stack models`
- model.layers, model.embed: size of the model
- data.name: text, chat, preferences, rollouts, images
- data.source: files of the data
- data.batch_size, data.seq_tokens: rows and tokens per row
- objective.name: causal_lm, dpo, grpo and others
- optimizer.learning_rate: peak of the schedule
- checkpoint.every_steps: interval of checkpoints
""",
)


def train(
    config: Path,
    /,
    *overrides: Annotated[str, Parameter(allow_leading_hyphen=True, group=_KEYS)],
    resume: Annotated[bool, Parameter(negative=())] = False,
    allow: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    hosts: str | None = None,
    launcher: str | None = None,
    json: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Train a model: stack train run.yaml --run.steps 300 --model.layers 6

    SIGTERM and the limit run.minutes save and exit with status 0; Ctrl-C saves and exits with status 2.

    Args:
      config: YAML file of the run.
      overrides: any number of --section.key VALUE.
      resume: resume from the newest complete checkpoint in the run's directory.
      allow: a config key that may differ from the resumed run or from the starting point; may be repeated.
      hosts: number of hosts to train on, or a range such as 2..4, with recovery from host failures (cluster.hosts).
      launcher: launcher that starts the agents on the hosts, such as processes (cluster.launcher).
      json: print the run's summary as JSON on standard output.
    """
    numbers = None if hosts is None else HostRange.parse(hosts, "--hosts")
    named = {"cluster.hosts": numbers, "cluster.launcher": launcher}
    given = [f"{key}={value}" for key, value in named.items() if value is not None]
    if (config / "config.yaml").is_file():
        raise ConfigError(
            f"{str(config)!r} is the directory of a run; expected a YAML file. `stack train {config}/config.yaml "
            "--resume` continues the run, and run.init_from in another file starts a new run from it."
        )
    mapping = apply_overrides(load_yaml(config), [*overrides_from(overrides), *given])
    if launcher is not None and not (isinstance(mapping["cluster"], dict) and mapping["cluster"].get("hosts")):
        raise ConfigError("--launcher acts only with several hosts. Set --hosts N, or leave it out.")
    # JAX is imported late, to report a typo in the file without delay.
    import jax

    from stack_train.run.session import train as run

    keep_compiled()
    summary = run(mapping, resume=resume, allow=allow, terminal=sys.stderr.isatty())
    if jax.process_index() != 0:
        return
    if summary.stopped_by is not None:
        cause = "the limit run.minutes" if summary.stopped_by == "SIGALRM" else summary.stopped_by
        print(f"stopped by {cause} after step {summary.step}; it is saved, --resume continues", file=sys.stderr)
    if json:
        print(json_format.dumps(dataclasses.asdict(summary), default=str))
