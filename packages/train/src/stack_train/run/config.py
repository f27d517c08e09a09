"""The config of a training run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import LocalAddress, LocalPath, Sections, Selected, config, parse, parse_yaml
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.plugins import registries
from stack_core.abi.run_directory import RunDirectory
from stack_core.runtime.config import ClusterConfig
from stack_core.runtime.processes import ProcessesConfig
from stack_train.checkpoint import CheckpointConfig
from stack_train.data.kinds.text import TextData
from stack_train.nn.schedules import ScheduleName
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig
from stack_train.precision import Precision

__all__ = ["PipelineConfig", "RunConfig", "RunSettings", "run_config"]


@config
class PipelineConfig:
    """How the stages of `mesh.stage` share a batch.

    Attributes:
      schedule: see `stack_train.nn.schedules.schedule`. "1f1b" keeps the inputs of at most 2 x stages
        microbatches on a stage, "gpipe" those of all; "interleaved" cuts the layers of a stage into `chunks` pieces.
      microbatches: parts of each batch that follow each other through the stages; the more, the less stages wait.
      chunks: pieces of layers on each stage: 1, or more for "interleaved".
    """

    schedule: ScheduleName = "1f1b"
    microbatches: PositiveInt = 8
    chunks: PositiveInt = 1


@config
class RunSettings:
    """How long a model is trained, and from what it starts.

    Attributes:
      steps: optimizer updates of the whole run.
      accumulation_steps: microbatches that each batch is cut into; their gradients are summed before the update.
      evaluate_every_steps: 0 evaluates after the last step only.
      init_from: the run directory whose newest weights this run starts from, or hf:DIR, a Hugging Face checkpoint.
      pipeline: how stages share a batch, where `mesh.stage` is more than 1.
      adapters_from: a run or a PEFT directory (`peft:DIR`) whose adapters those of this run start as.
    """

    steps: PositiveInt = 1000
    accumulation_steps: PositiveInt = 1
    evaluate_every_steps: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    init_from: Annotated[LocalAddress, AfterValidator(lambda address: address.removeprefix("run:"))] | None = None
    adapters_from: LocalAddress | None = None
    pipeline: PipelineConfig = PipelineConfig()


@config
class RunConfig:
    """A whole run; `output` is the directory that it owns.

    Attributes:
      sections: what installed packages add to a run, such as `profile:`.
    """

    output: LocalPath
    model: Annotated[Any, Selected(registries.models, "family")]
    data: Annotated[Any, Selected(registries.batches, "kind")] = TextData()
    objective: Annotated[Any, Selected(registries.objectives, "name")] = CausalLMConfig()
    optimizer: Annotated[Any, Selected(registries.optimizers, "name")] = AdamWConfig()
    precision: Precision = Precision()
    run: RunSettings = RunSettings()
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    mesh: MeshConfig = MeshConfig()
    processes: ProcessesConfig = ProcessesConfig()
    cluster: ClusterConfig = ClusterConfig()
    sections: Annotated[Mapping[str, Any], Sections(registries.sections)] = Field(default_factory=dict)


def run_config(run: Path) -> RunConfig:
    """Reads the resolved config of the run in a directory.

    Raises:
      RunDirectoryError: there is no run.
      ConfigError: its config does not fit what is installed.
    """
    directory = RunDirectory(run)
    return parse(RunConfig, parse_yaml(directory.config_yaml(), str(directory.config)))
