"""Ahead-of-time compilation of an engine's programs for a target, to check that they fit in its memory."""

import jax

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.chips.targets import Target, use_target
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.limits import Limits
from stack_serve.llm.mtp import programs_class
from stack_serve.llm.placement import AbstractPlacement

__all__ = ["compile_engine"]


def compile_engine(
    checkpoint: GenerativeCheckpoint, config: EngineConfig, target: Target
) -> dict[str, jax.stages.Compiled]:
    """Compiles the "decode" and "prefill" programs with the largest memory use, without reading parameters.

    `stack_core.programs.roofline.program_memory` computes the memory per device of each program.

    Args:
      checkpoint: model to compile.
      config: settings of the engine. If `pages` is None, it is derived from the free memory of this machine.
      target: hardware to compile for.

    Raises:
      HardwareError: the compiler of the target is missing, or the target has fewer devices than the config.
      ConfigError: the config is inconsistent with the model.
    """
    limits = Limits.of(checkpoint, config)
    placement = AbstractPlacement(checkpoint.states, config.tensor, target.devices, expert=config.expert)
    sizes = {"max_tokens": limits.max_tokens, "pages": limits.pages}
    with use_target(target):
        return programs_class(config)(checkpoint, config, **sizes, placement=placement).largest()
