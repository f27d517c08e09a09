"""Adapters of training runs: reading without the base model, checks against a base, and initialization of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.nnx.traversals import flatten_mapping, unflatten_mapping

from stack_core.abi.adapters import Adapters, AdaptsModels
from stack_core.abi.errors import ConversionError
from stack_core.abi.installing import install_command
from stack_core.abi.models import ConvertibleFamily
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_train.checkpoint import CheckpointStore, FrozenRecord
from stack_train.checkpoint.frozen import frozen_records
from stack_train.checkpoint.leaves import LeafSpec
from stack_train.checkpoint.manifest import read_documents, read_manifest
from stack_train.optim.optax_optimizer import as_optimizer
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import stored_model
from stack_train.run.start import model_differences
from stack_train.run.transforms import transform_of
from stack_train.step.program import Program
from stack_train.step.state import TrainState
from stack_train.variables.model_variables import ModelVariables, values_of
from stack_train.variables.weights import read_model

__all__ = [
    "Digests",
    "RunAdapters",
    "adapter_section",
    "check_base",
    "check_model",
    "digests_of_run",
    "run_adapters",
    "with_adapters",
]

Digests = Mapping[str, tuple[LeafSpec, str]]
"""Spec and digest of each leaf of a model, by path."""


@dataclass(frozen=True)
class RunAdapters:
    """The trained adapters of a run.

    Attributes:
      adapters: adapters of the newest intact checkpoint.
      config: config of the run.
      step: training step of the checkpoint.
      base: source and digests of the frozen variables; None for checkpoints with all variables.
    """

    adapters: Adapters
    config: RunConfig
    step: int
    base: FrozenRecord | None


def run_adapters(run: Path) -> RunAdapters:
    """Reads the adapters of a run's newest intact checkpoint, without the base model.

    Raises:
      RunDirectoryError: `run` is not a run directory.
      ConversionError: the run does not train adapters.
      CheckpointError: the run does not have an intact checkpoint.
    """
    config = run_config(run)
    adapting = transform_of(config).adapting
    if adapting is None:
        raise ConversionError(f"The run {run} has no adapters: no section of its config, such as lora, adds any.")
    variables = ModelVariables.of(stored_model(config))
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        restored = store.restore_variables(variables.abstract)
    # Averages are computed from the optimizer's state as well, which only `read_model` reads.
    if as_optimizer(config.optimizer).averages and restored.kind != "weights":
        model, step = read_model(run, config)
    else:
        # Without the base: frozen matrices that the checkpoint omits remain shapes.
        held = dict(_leaves(restored.state, variables))
        model, step = variables.merge(variables.select({**variables.shapes, **held}, "frozen")), restored.step
    return RunAdapters(adapting.adapters(model), config, step, restored.frozen.get("model"))


def check_model(run: Path, found: RunAdapters, config: Any) -> None:
    """Raises a ConversionError if a run's adapters belong to a different model; names the config keys that differ."""
    lines = model_differences(found.config.model, config)
    if lines and not _is_same_model(found.config.model, config):
        listing = "\n  ".join(lines)
        raise ConversionError(f"The adapters of {run} were trained on a different model:\n  {listing}")


def check_base(adapters: str, known: Digests, found: Digests) -> None:
    """Checks that the base of adapters is the base that they were trained on.

    Only leaves that both bases have with equal shape and dtype are compared, which excludes quantized matrices.

    Args:
      adapters: name of the adapters in the message.
      known: digests of the base during training.
      found: digests of the base that will receive the adapters.

    Raises:
      ConversionError: the values of a leaf differ; names both digests.
    """
    lines = [
        f"  {name}: digest {digest} when they were trained, {found[name][1]} here"
        for name, (spec, digest) in known.items()
        if name in found and found[name][0] == spec and found[name][1] != digest
    ]
    if lines:
        raise ConversionError(
            f"The adapters of {adapters} were trained on another base:\n" + "\n".join(lines) + "\nGive that base."
        )


def digests_of_run(run: Path) -> Digests:
    """Returns the digests of all variables of a run's newest checkpoint, including frozen variables.

    Empty without checkpoints, or if the model consists of averaged parameters.
    """
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        step = store.latest()
        if step is None:
            return {}
        directory = store.path(step)
    manifest = read_manifest(directory)
    records = frozen_records(read_documents(directory, manifest))
    frozen = records.get("model")
    if as_optimizer(run_config(run).optimizer).averages and manifest.kind != "weights":
        return {}  # The model is the average of the parameters, and checkpoints do not store digests of averages.
    stored = {
        name.partition("/")[2]: (record.spec, record.digest)
        for name, record in manifest.leaves.items()
        if name.partition("/")[0] in ("params", "moved")
    }
    given = {} if frozen is None else {name: (spec, frozen.digests[name]) for name, spec in frozen.specs.items()}
    return {**stored, **given}


def adapter_section(adapters: Adapters) -> tuple[str, Any]:
    """Returns the name and config of the section that adds such adapters to a run.

    Raises:
      ConversionError: no installed package adds adapters.
    """
    for name in registries.transforms:
        factory = registries.transforms[name]
        # Some factories are functions, for which `issubclass` would raise.
        if isinstance(factory, type) and issubclass(factory, AdaptsModels):
            return name, factory.section_of(adapters)
    raise ConversionError(f"No installed package adds adapters: {install_command('stack-quant')}.")


def with_adapters(state: TrainState, program: Program, config: RunConfig, adapters: Adapters) -> TrainState:
    """Replaces the newly initialized adapters in a run's initial state with `adapters`.

    Args:
      state: state of the run before its first step.
      config: config of the run, with a section that adds adapters.

    Raises:
      StackError: the adapters differ from the section's description; names each difference.
    """
    adapting = transform_of(config).adapting
    assert adapting is not None, "checked before the run starts"
    model = adapting.with_adapters(program.step.model.merge(program.step.variables(state)), adapters)
    values, params = values_of(model), flatten_mapping(state.params)
    given = {path: jax.device_put(values[path], old.sharding) for path, old in params.items()}
    return replace(state, params=unflatten_mapping(given))


def _is_same_model(left: Any, right: Any) -> bool:
    """Returns True if two configs are equal after conversion to `config.json`, apart from dtypes.

    Fields that `config.json` does not store may differ.
    """
    family = registries.models[left.name]
    if left.name != right.name or not isinstance(family, ConvertibleFamily):
        return False
    left, right = (replace(config, dtype="float32", param_dtype="float32") for config in (left, right))
    return family.config_map.write(left) == family.config_map.write(right)


def _leaves(tree: Any, variables: ModelVariables) -> Iterator[tuple[Any, Any]]:
    """Yields the path and value of each frozen variable that the checkpoint stored."""
    for path in variables.paths("frozen"):
        value: Any = tree
        for name in path:
            value = value[name]
        # An omitted variable was restored as None, a tree without leaves.
        if jax.tree.leaves(value):
            yield path, jax.tree.map(np.asarray, value)
