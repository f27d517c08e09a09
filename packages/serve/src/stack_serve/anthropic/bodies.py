"""Bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from stack_serve.openai.schemas import FUNCTION_NAME, Body

__all__ = ["CountBody", "MessagesBody", "OutputConfig", "Thinking", "ToolChoice"]


# For the document of `openapi.py`; `chat_body` checks these fields.
_BLOCK = {"type": "object", "required": ["type"], "properties": {"type": {"type": "string"}}}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK, "minItems": 1}]}
_Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT},
        }
    ),
]
_Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["name", "input_schema"],
            "properties": {
                "name": {"type": "string", "pattern": f"^{FUNCTION_NAME}$"},
                "input_schema": {"type": "object"},
            },
        }
    ),
]


class _Part(BaseModel):
    """A nested object; unknown members and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Thinking(_Part):
    """Switch of the reasoning before the answer.

    Attributes:
      budget_tokens: required by the API; accepted without effect, because `max_tokens` bounds the answer.
      display: "omitted" leaves the text of thinking blocks out.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(_Part):
    """JSON Schema of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(_Part):
    """Effort of reasoning, and format of the text."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class ToolChoice(_Part):
    """Permission or duty to call tools; `name` belongs to the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class CountBody(Body):
    """`POST /v1/messages/count_tokens`: the fields that shape a prompt.

    Attributes:
      messages, system, tools: checked by `chat_body`.
      cache_control: accepted without effect, because the engine finds common prefixes of prompts itself.
    """

    model: Annotated[str | None, WithJsonSchema({"type": "string"})] = Field()
    messages: list[_Message] = Field(min_length=1)
    system: Annotated[Any, WithJsonSchema(_CONTENT)] = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None


class MessagesBody(CountBody):
    """`POST /v1/messages`.

    Attributes:
      metadata: note of the client, which the server ignores.
    """

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    temperature: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
