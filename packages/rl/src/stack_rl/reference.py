"""`data.reference`: a reference model on a separate mesh that scores each batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jaxtyping import Float32

from stack_core.abi.config import LocalAddress, config
from stack_core.abi.data import Batch
from stack_core.abi.errors import ConfigError, DataError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.mesh import MeshConfig
from stack_core.abi.model_formats import open_for_generation
from stack_core.text.images import image_reader_of
from stack_rl.episode_images import IMAGE_INPUTS
from stack_rl.objectives.policy import target_figures
from stack_rl.objectives.sampled import SAMPLING_INPUTS
from stack_rl.placing import ShardedCheckpoint

__all__ = ["Reference", "ReferenceConfig"]

_READ: Final = ("tokens", "targets", "positions", "segment_ids", "behaviour_logprobs", *SAMPLING_INPUTS, *IMAGE_INPUTS)


@config
class ReferenceConfig:
    """Reference model of an objective with `reference: data`; it scores every batch before the training step.

    The model has a separate mesh: it takes memory on the trainer's devices only if the meshes overlap.

    Attributes:
      source: "run:DIRECTORY", such as the run in `run.init_from`.
      mesh: mesh over the machine's last devices; by default over all devices.
    """

    source: LocalAddress
    mesh: MeshConfig = MeshConfig()

    def __post_init__(self) -> None:
        if not self.source.startswith("run:"):
            raise ConfigError(
                f"data.reference.source is {self.source!r}; name a run, such as the one that this run starts from: "
                "run:DIRECTORY."
            )

    def check(self) -> None:
        """Raises a ConfigError if the run's directory does not exist."""
        if not Path(self.source.removeprefix("run:")).is_dir():
            raise ConfigError(
                f"data.reference.source is {self.source!r}, which is not a directory. Name the directory of a run."
            )


class Reference:
    """The model of a `ReferenceConfig`, with its parameters sharded over its mesh.

    Raises:
      DataError: the vocabulary size differs from the policy's, or the reference has fewer positions.
      ShardingError: the mesh has more devices than the machine.
      StackError: the checkpoint cannot be read.
    """

    def __init__(self, settings: ReferenceConfig, policy: GenerativeCheckpoint) -> None:
        opened = open_for_generation(settings.source.removeprefix("run:"))
        if opened.vocab_size != policy.vocab_size or opened.max_positions < policy.max_positions:
            raise DataError(
                f"The reference {settings.source} has {opened.vocab_size} tokens and {opened.max_positions} positions; "
                f"the policy has {policy.vocab_size} and {policy.max_positions}. Name a run of a model like it."
            )
        self._model: Any = ShardedCheckpoint(opened, settings.mesh, "data.reference.mesh")
        self._params = self._model.load_params()
        self._scores = jax.jit(self._scored, out_shardings=self._model.whole)

    def logprobs(self, batch: Batch) -> Float32[np.ndarray, "rows seq"]:
        """Computes log p(target) under the reference, or 0 at positions without a target.

        The reference's distribution is processed like the policy's when it sampled; see `sampled_figures`.
        """
        read = {name: batch[name] for name in _READ if name in batch}
        if "pixels" in read and image_reader_of(self._model) is None:
            raise DataError(
                f"The episodes have images (data.row_images), but the reference {self._model.name} reads text only. "
                "Name a run of a model like the policy in data.reference.source."
            )
        return np.asarray(jax.device_get(self._scores(self._params, read)), np.float32)

    def _scored(self, params: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        return target_figures(self._model.model(params), batch).logprobs
