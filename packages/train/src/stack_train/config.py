"""The config of a training run."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.config import Sections, Selected, config
from stack_core.mesh import MeshConfig
from stack_core.plugins import registries
from stack_train.checkpoint import CheckpointConfig
from stack_train.data import DataConfig
from stack_train.objectives import CausalLMConfig
from stack_train.optim import AdamWConfig

__all__ = ["RunConfig", "TrainerConfig"]


@config
class TrainerConfig:
    """How long and how a model is trained.

    Attributes:
      steps: optimizer updates of the whole run.
      accumulation_steps: parts into which each batch is cut; their gradients are summed before the update.
      evaluate_every_steps: 0 evaluates after the last step only.
      init_from: a run directory whose newest weights this run starts from.
    """

    steps: PositiveInt = 1000
    accumulation_steps: PositiveInt = 1
    evaluate_every_steps: NonNegativeInt = 0
    seed: NonNegativeInt = 0
    init_from: str | None = None


@config
class RunConfig:
    """A whole run; `output` is the directory that it owns.

    Attributes:
      sections: what installed packages add to a run, such as `profile:`.
    """

    output: str
    model: Annotated[Any, Selected(registries.models, "family")]
    data: DataConfig = Field(default_factory=DataConfig)
    objective: Annotated[Any, Selected(registries.objectives, "name")] = CausalLMConfig()
    optimizer: Annotated[Any, Selected(registries.optimizers, "name")] = AdamWConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    mesh: MeshConfig = MeshConfig()
    sections: Annotated[Mapping[str, Any], Sections(registries.configs)] = Field(default_factory=dict)
