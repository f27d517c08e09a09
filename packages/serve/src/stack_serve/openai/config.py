"""What a server of one language model is made with."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt

from stack_core.abi.config import config
from stack_serve.http.config import Seconds, ServerConfig

__all__ = ["OpenAIConfig"]


@config
class OpenAIConfig(ServerConfig):
    """What clients call the model, and what they may ask of it.

    Attributes:
      model_names: what clients call the model; the first is what they are told. None is the checkpoint's own name.
      chat_template: file of a Jinja template that is used instead of the model's own.
      timeout_s: after so long a request ends with status 504; None never.
      max_choices: prompts of a request times the continuations of each.
    """

    model_names: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    chat_template: Path | None = None
    timeout_s: Seconds | None = None
    max_choices: PositiveInt = 1024
