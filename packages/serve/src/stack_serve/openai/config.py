"""Configuration of a server for one language model."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.engines import Pooling
from stack_serve.http.config import Seconds, ServerConfig

__all__ = ["OpenAIConfig"]


@config
class OpenAIConfig(ServerConfig):
    """Configuration of the OpenAI-compatible server: model names and request limits.

    Attributes:
      model_names: names that clients may use for the model. None uses the checkpoint's own name.
      chat_template: path of a Jinja template that replaces the model's own. None keeps the model's.
      tool_parser: name of the format in which the model writes tool calls, or "none". None lets the chat template
        decide.
      reasoning_parser: name of the format in which the model marks its reasoning, or "none". None lets the chat
        template decide.
      timeout_s: seconds after which a request ends with status 504. None sets no limit.
      max_choices: maximum of a request's number of prompts times the continuations per prompt, and of the texts that
        wait for their embeddings.
      adapter_loading: True lets clients load adapters from paths on this machine, and unload adapters.
      sleep_mode: True if clients may put the engine to sleep and wake it up.
      weight_updates: True lets clients replace the weights by those of a checkpoint on this machine.
      stored_responses: maximum number of responses of `/v1/responses` in memory, which `previous_response_id` may name.
      remote_images: True if the server fetches images of chat messages from http(s) URLs; data URLs are always read.
      pooling: vector of a text in `/v1/embeddings`. None follows the recommendation of an encoder's directory; for
        language models, it means "last".
    """

    model_names: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    chat_template: Path | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    timeout_s: Seconds | None = None
    max_choices: PositiveInt = 1024
    pooling: Pooling | None = None
    adapter_loading: bool = False
    sleep_mode: bool = False
    weight_updates: bool = False
    stored_responses: NonNegativeInt = 256
    remote_images: bool = False
