"""Body of OpenAI's Responses API."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from stack_serve.openai.schemas import FUNCTION_NAME, Body

__all__ = ["Reasoning", "ResponsesBody", "TextConfig"]


# For the document of `openapi.py`; `input_messages` and `chat_body` check these fields.
_TEXT = {"type": "string"}
_NAME = {**_TEXT, "pattern": f"^{FUNCTION_NAME}$"}
_TYPED = {"type": "object", "required": ["type"], "properties": {"type": _TEXT}}
_MESSAGE = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["user", "system", "developer", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _TYPED}]},
    },
}
_Input = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": {"anyOf": [_MESSAGE, _TYPED]}}]})]
_Choice = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _TYPED]})]
_Tool = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, "name": _NAME, "parameters": {"type": "object"}},
        }
    ),
]


class _Part(BaseModel):
    """A nested object; unknown members and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True)


class TextFormat(_Part):
    """Format of the text; the name and the description of a schema are ignored, and it is enforced in any case."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(_Part):
    """Format of the text."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(_Part):
    """Effort of reasoning; `summary: "auto"` is ignored, because items contain the reasoning itself."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(_Part):
    """Additional contents of a stream."""

    include_obfuscation: Literal[False] = False


class ResponsesBody(Body):
    """`POST /v1/responses`.

    Attributes:
      input: a text, or items as checked by `chat_body`.
      store: whether to store the response in memory for `previous_response_id`.
      include: accepted without effect: reasoning items have no encrypted content, since they contain their text.
      tools, tool_choice: checked by `chat_body`.
      user, safety_identifier, prompt_cache_key, prompt_cache_retention: notes of the client, which the server ignores.
    """

    input: _Input
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: _Choice = None
    parallel_tool_calls: bool = True
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] = Field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    background: Literal[False] = False
    top_logprobs: Literal[0] = 0
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
