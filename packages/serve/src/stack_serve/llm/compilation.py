"""An engine's programs, compiled for hardware that need not be there: do they fit?"""

import jax

from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.chips.targets import Target, use_target
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.limits import Limits
from stack_serve.llm.placement import AbstractPlacement
from stack_serve.llm.programs import Programs

__all__ = ["compile_engine"]


def compile_engine(
    checkpoint: GenerativeCheckpoint, config: EngineConfig, target: Target
) -> dict[str, jax.stages.Compiled]:
    """Compiles what an engine needs the most memory for, "decode" and "prefill"; no parameters are read.

    `stack_core.programs.roofline.program_memory` says what one device holds while each runs.

    Args:
      config: with `pages`, or what fits in the memory of this machine is taken.

    Raises:
      HardwareError: the target's compiler is missing, or it has fewer devices than `config.tensor`.
      ConfigError: the config does not fit the model.
    """
    limits = Limits.of(checkpoint, config)
    placement = AbstractPlacement(checkpoint.states, config.tensor, target.devices)
    sizes = {"max_tokens": limits.max_tokens, "pages": limits.pages}
    with use_target(target):
        return Programs(checkpoint, config, **sizes, placement=placement).largest()
