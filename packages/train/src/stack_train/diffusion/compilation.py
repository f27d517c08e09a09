"""The loop of a sampler on a mesh, traced for the batch of a run, and its cost on a target."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from stack_core.abi.errors import ConfigError
from stack_core.chips.targets import Target
from stack_core.programs.flops import Flops, model_flops_per_call
from stack_train.diffusion.denoiser import Images, ImagesConfig, condition_of, image_tokens, positive
from stack_train.diffusion.latents import initial_noise, sample_latents, sampling_table
from stack_train.diffusion.objectives import Denoises, denoising_of
from stack_train.diffusion.samplers import SamplerConfig
from stack_train.run.checks import check_sections
from stack_train.run.compilation import StepReport, report_of
from stack_train.run.config import RunConfig
from stack_train.run.program import build_program, naming_sizes, on_one_device
from stack_train.step.program import Program

__all__ = ["SamplingProgram", "compile_sampling"]


class SamplingProgram:
    """Sampling of a batch with the denoiser of a run, whose devices split the denoiser as in training.

    Args:
      program: program of the run.
      sampler: settings of the sampler.
      batch: shapes of a training batch: the images, their weights, and their conditions.

    Raises:
      ConfigError: the run trains no denoiser, or guidance is set for a model without conditions.
    """

    def __init__(self, program: Program, sampler: SamplerConfig, batch: Mapping[str, Any]) -> None:
        objective: Any = denoising_of(program.step.objective)
        if not isinstance(objective, Denoises) or not isinstance(program.step.model.config, ImagesConfig):
            raise ConfigError(
                f"Family {program.step.model.family.name!r} with this objective makes no images. Leave --sample out; "
                "it is for the objectives flow_matching, epsilon and v."
            )
        condition = condition_of(batch)
        if sampler.guidance == 1.0:
            condition = positive(condition)
        if sampler.guidance != 1.0 and not condition:
            raise ConfigError(f"guidance is {sampler.guidance}, and the model has no condition. Set it to 1.")
        self._program, self._sampler, self._shape = program, sampler, batch["images"].shape
        self.condition = condition
        tokens = image_tokens(program.step.model.abstract, *self._shape[1:-1])
        self.table = sampling_table(sampler, objective, tokens)

    def __call__(self, variables: Any, condition: Mapping[str, jax.Array], key: jax.Array) -> Images:
        """Samples images or latents (pure).

        Args:
          variables: variables of the run's model, as nested dicts.
          condition: condition of each image, with the names and shapes of `self.condition`.
        """
        model = self._program.step.model.variables.merge(variables)
        model.eval()
        noise = initial_noise(self._shape, key=key)
        return sample_latents(model, condition, noise, sampler=self._sampler, table=self.table, key=key)

    def jitted(self) -> Any:
        """Returns the program under `jax.jit`, with the arguments and the images sharded over the run's mesh."""
        program = self._program
        shardings = (program.variable_shardings, program.batch_shardings(self.condition), self._replicated)
        images = jax.ShapeDtypeStruct(self._shape, "float32")
        out = program.batch_shardings({"images": images})["images"]
        return jax.jit(program.on_mesh(self.__call__), in_shardings=shardings, out_shardings=out)

    def trace(self) -> jax.stages.Traced:
        """Traces the program for the shapes of the batch; nothing is allocated."""
        return self.jitted().trace(*self._abstract)

    def flops(self) -> Flops:
        """Counts the FLOPs that the model needs, for a program on one device."""
        return model_flops_per_call(self._program.on_mesh(self.__call__), *self._abstract)

    @property
    def _abstract(self) -> tuple[Any, ...]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        return self._program.abstract_variables, self.condition, key

    @property
    def _replicated(self) -> NamedSharding:
        return NamedSharding(self._program.mesh, PartitionSpec())


def compile_sampling(config: RunConfig, sampler: SamplerConfig, target: Target) -> StepReport:
    """Compiles the sampling of `data.batch_size` images or videos for a target, from shapes.

    The program is the loop of the sampler from noise to images or latents, without text encoders and autoencoder.

    Raises:
      ConfigError: see `SamplingProgram`.
      HardwareError: the target's compiler is missing, or fails for another reason than memory.
      ShardingError: the mesh does not divide an array; names the config keys that set the sizes.
    """
    check_sections(config)
    shapes = config.batches.spec(config.model)
    program = build_program(config, target.devices)
    sampling = SamplingProgram(program, sampler, shapes)

    def traced() -> jax.stages.Traced:
        with naming_sizes(config):
            return sampling.trace()

    def needed() -> Flops:
        single = build_program(on_one_device(config), program.mesh.devices.flatten()[:1].tolist())
        return SamplingProgram(single, sampler, shapes).flops()

    # Each trip of the sampler's loop reads all parameters once.
    trips = len(sampling.table.rows)
    report, _ = report_of(config, program, target, traced=traced, needed=needed, outer_trips=trips)
    return dataclasses.replace(report, program="sampling")
