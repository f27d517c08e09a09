"""The config of a training run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt

from stack_core.abi.config import (
    LocalAddress,
    Sections,
    Selected,
    config,
    parse,
    parse_yaml,
    with_current_keys,
)
from stack_core.abi.data import FollowsObjective
from stack_core.abi.errors import ConfigError, RunDirectoryError
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.processes import ProcessesConfig
from stack_train.checkpoint import CheckpointConfig
from stack_train.data.kinds.text import TextData
from stack_train.data.ramp import RampStage
from stack_train.nn.schedules import ScheduleName
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig
from stack_train.step.precision import Precision
from stack_train.storage.address import StorageAddress, StoragePath

__all__ = ["PipelineConfig", "RunConfig", "RunSettings", "batches_of", "run_config", "saved_config"]


@config
class PipelineConfig:
    """Pipeline parallelism: the schedule of the stages of `mesh.stage`, which must be more than 1.

    Attributes:
      schedule: pipeline schedule. "1f1b" stores the inputs of at most 2 x stages microbatches on a stage, "gpipe" the
        inputs of all microbatches; "interleaved" cuts the layers of a stage into `chunks` pieces.
      microbatches: number of microbatches per batch. More microbatches mean a smaller pipeline bubble.
      chunks: number of pieces that the layers of a stage are cut into; must be 1 unless `schedule` is "interleaved".
    """

    schedule: ScheduleName = "1f1b"
    microbatches: PositiveInt = 8
    chunks: PositiveInt = 1


@config
class RunSettings:
    """Length and starting point of a training run.

    Attributes:
      steps: total number of optimizer updates.
      accumulation_steps: number of microbatches per batch, whose gradients are accumulated before the update. It must
        divide the batch size; 1 computes the gradients of a batch in one pass.
      ramp: stages of smaller batches at the start of the run, each with `rows` and `steps`. A batch of the data is
        divided between several steps, and each row is still trained on once. Batches have `data.batch_size` rows
        after the last stage.
      evaluate_every_steps: number of steps between evaluations; 0 evaluates only after the last step.
      minutes: wall minutes after which the session saves its state and ends, as after SIGTERM; `--resume` continues the
        run. Compilation counts. None sets no limit.
      seed: seed of the initial parameters, the order of the data and the random numbers of each step.
      init_from: run, in a directory or in object storage, whose newest weights are the initial weights; or hf:DIR for
        a Hugging Face checkpoint. None initializes the parameters randomly.
      adapters_from: run or PEFT directory (`peft:DIR`) with the initial adapters. None creates new adapters if a
        section of the config adds any.
      pipeline: pipeline schedule, used if `mesh.stage` is more than 1.
    """

    steps: PositiveInt = 1000
    accumulation_steps: PositiveInt = 1
    ramp: tuple[RampStage, ...] = ()
    evaluate_every_steps: NonNegativeInt = 0
    minutes: PositiveFloat | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    init_from: Annotated[StorageAddress, AfterValidator(lambda address: address.removeprefix("run:"))] | None = None
    adapters_from: LocalAddress | None = None
    pipeline: PipelineConfig = PipelineConfig()


@config
class RunConfig:
    """Config of a training run.

    Attributes:
      output: directory of the run, which no other run may use; or "s3://BUCKET/FOLDER" or "gs://BUCKET/FOLDER", with a
        local copy in the user's cache.
      model: model config; `name` selects a registered model family.
      data: training and validation data; `name` selects a registered kind of data. Text by default.
      objective: training objective, selected by `name`; next-token prediction by default.
      optimizer: optimizer and learning-rate schedule, selected by `name`; AdamW by default.
      precision: dtype of the trained parameters; float32 by default.
      run: length and starting point of the run.
      checkpoint: interval and retention of checkpoints.
      mesh: sizes of the mesh axes, and sharding rules.
      processes: JAX processes that train together; a single process by default.
      cluster: hosts that train together under a driver; by default training runs in the current process.
      sections: configs of installed packages by section name, such as `profile` or `lora`.
    """

    output: StoragePath
    model: Annotated[Any, Selected(registries.models, former="family")]
    data: Annotated[Any, Selected(registries.data, former="kind")] = TextData()
    objective: Annotated[Any, Selected(registries.objectives)] = CausalLMConfig()
    optimizer: Annotated[Any, Selected(registries.optimizers)] = AdamWConfig()
    precision: Precision = Precision()
    run: RunSettings = RunSettings()
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    mesh: MeshConfig = MeshConfig()
    processes: ProcessesConfig = ProcessesConfig()
    cluster: ClusterConfig = ClusterConfig()
    sections: Annotated[Mapping[str, Any], Sections(registries.sections)] = Field(default_factory=dict)

    @property
    def batches(self) -> Any:
        """Config of the batches: `data`, adapted to the objective if it depends on the objective."""
        return batches_of(self.data, self.objective)


def batches_of(data: Any, objective: Any) -> Any:
    """Returns the `DataConfig` of batches for an objective.

    Raises:
      ConfigError: the objective cannot be trained on this data.
    """
    return data.for_objective(objective) if isinstance(data, FollowsObjective) else data


def saved_config(directory: RunDirectory) -> dict[str, Any]:
    """Reads the resolved config of a run as a mapping, with the current names of its keys.

    Raises:
      RunDirectoryError: the directory holds no run, or its config is damaged.
    """
    text = directory.config_yaml()
    try:
        mapping = parse_yaml(text, str(directory.config))
    except ConfigError as error:
        raise _damaged(directory, str(error)) from error
    # A run writes all keys, so the file was truncated if a required one is missing.
    if "model" not in mapping:
        raise _damaged(directory, f"{str(directory.config)!r} has no key 'model', which the run wrote.")
    return with_current_keys(RunConfig, mapping)


def _damaged(directory: RunDirectory, problem: str) -> RunDirectoryError:
    copies = sorted(directory.checkpoints.glob("[0-9]*/config.yaml"))
    remedy = f"Replace the file by the copy {copies[-1]}." if copies else "Restore the file."
    return RunDirectoryError(f"The run {directory.path} is damaged: {problem} {remedy}")


def run_config(run: Path) -> RunConfig:
    """Reads the resolved config of a run.

    Raises:
      RunDirectoryError: the directory holds no run, or its config is damaged.
      ConfigError: the config does not match the installed packages.
    """
    directory = RunDirectory(run)
    saved = saved_config(directory)
    try:
        return parse(RunConfig, saved)
    except ConfigError as error:
        raise ConfigError(
            f"{directory.config}, the config of a run, is not valid: {error}\nThe run is damaged, or was written by "
            "another version of the packages."
        ) from error
