"""Adapters that runs train: read apart from their base, compared with another, and put into a run that starts."""

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
from stack_train.run.config import RunConfig, run_config
from stack_train.run.model import stored_model
from stack_train.run.start import model_differences
from stack_train.run.transforms import transform_of
from stack_train.step.program import Program
from stack_train.step.state import TrainState
from stack_train.variables import ModelVariables, values_of
from stack_train.weights import load_model

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
"""What a model's leaves are, and their digests, by path."""


@dataclass(frozen=True)
class RunAdapters:
    """What a run trained.

    Attributes:
      base: where the run has its frozen variables from, and their digests; None if its checkpoint holds them.
    """

    adapters: Adapters
    config: RunConfig
    step: int
    base: FrozenRecord | None


def run_adapters(run: Path) -> RunAdapters:
    """Reads the adapters of a run's newest checkpoint, without its base.

    Raises:
      RunDirectoryError: there is no run.
      ConversionError: it has no adapters.
      CheckpointError: no checkpoint can be used.
    """
    config = run_config(run)
    adapting = transform_of(config).adapting
    if adapting is None:
        raise ConversionError(f"The run {run} has no adapters: no section of its config, such as lora, adds any.")
    variables = ModelVariables.of(stored_model(config))
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        restored = store.restore_variables(variables.abstract)
    if config.optimizer.averages and restored.kind != "weights":
        model, step = load_model(run, config)
    else:
        held = dict(_leaves(restored.state, variables))
        model, step = variables.merge(variables.select({**variables.shapes, **held}, "frozen")), restored.step
    return RunAdapters(adapting.adapters(model), config, step, restored.frozen.get("model"))


def check_model(run: Path, found: RunAdapters, config: Any) -> None:
    """Raises a ConversionError where a run's adapters are of a model that computes something else; names the keys."""
    lines = model_differences(found.config.model, config)
    if lines and not _is_same_model(found.config.model, config):
        listing = "\n  ".join(lines)
        raise ConversionError(f"The adapters of {run} are of another model than this one:\n  {listing}")


def check_base(adapters: str, known: Digests, found: Digests) -> None:
    """Compares the base that adapters were trained on with the one that they are to go onto.

    Leaves that only one of them has, or has in another dtype, as a quantized base does, are passed over.

    Raises:
      ConversionError: a leaf has other values; names both digests.
    """
    lines = [
        f"  {name}: digest {digest} when they were trained, {found[name][1]} here"
        for name, (spec, digest) in known.items()
        if name in found and found[name][0] == spec and found[name][1] != digest
    ]
    if lines:
        raise ConversionError(
            f"The adapters of {adapters} were trained on another base:\n" + "\n".join(lines) + "\nGive their own base."
        )


def digests_of_run(run: Path) -> Digests:
    """The digests of the variables in a run's newest checkpoint, and of those that it leaves to their source."""
    with CheckpointStore(RunDirectory(run).checkpoints) as store:
        step = store.latest()
        if step is None:
            return {}
        directory = store.path(step)
    manifest = read_manifest(directory)
    records = frozen_records(read_documents(directory, manifest))
    frozen = records.get("model")
    if run_config(run).optimizer.averages and manifest.kind != "weights":
        return {}  # the model is made of averages, of which there are no digests
    stored = {
        name.partition("/")[2]: (record.spec, record.digest)
        for name, record in manifest.leaves.items()
        if name.partition("/")[0] in ("params", "moved")
    }
    given = {} if frozen is None else {name: (spec, frozen.digests[name]) for name, spec in frozen.specs.items()}
    return {**stored, **given}


def adapter_section(adapters: Adapters) -> tuple[str, Any]:
    """The name and the config of a run's section that adds adapters like these.

    Raises:
      ConversionError: no installed package adds adapters.
    """
    for name in registries.transforms:
        factory = registries.transforms[name]
        if isinstance(factory, type) and issubclass(factory, AdaptsModels):
            return name, factory.section_of(adapters)
    raise ConversionError(f"No installed package adds adapters: {install_command('stack-quant')}.")


def with_adapters(state: TrainState, program: Program, config: RunConfig, adapters: Adapters) -> TrainState:
    """The state before a run's first step, with given adapters in the place of new ones.

    Args:
      config: of the run, which adds adapters.

    Raises:
      StackError: they are not those that its section describes; names each that differs.
    """
    adapting = transform_of(config).adapting
    assert adapting is not None, "checked before the run starts"
    model = adapting.with_adapters(program.step.model.merge(program.step.variables(state)), adapters)
    values, params = values_of(model), flatten_mapping(state.params)
    given = {path: jax.device_put(values[path], old.sharding) for path, old in params.items()}
    return replace(state, params=unflatten_mapping(given))


def _is_same_model(left: Any, right: Any) -> bool:
    """Whether two configs describe one model, where the one leaves out what the other says."""
    family = registries.models[left.family]
    if left.family != right.family or not isinstance(family, ConvertibleFamily):
        return False
    left, right = (replace(config, dtype="float32", param_dtype="float32") for config in (left, right))
    return family.config_map.write(left) == family.config_map.write(right)


def _leaves(tree: Any, variables: ModelVariables) -> Iterator[tuple[Any, Any]]:
    """The variables that a checkpoint held, with their paths."""
    for path in variables.paths("frozen"):
        value: Any = tree
        for name in path:
            value = value[name]
        if jax.tree.leaves(value):
            yield path, jax.tree.map(np.asarray, value)
