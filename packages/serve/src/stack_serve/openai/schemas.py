"""Bodies of requests, with the fields that take effect or change nothing in the answer.

`null` is the same as leaving a field out, at the top of a body.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from stack_core.abi.generation import MOST_STOP_CHARACTERS, MOST_STOP_TEXTS

__all__ = [
    "FUNCTION_NAME",
    "Body",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "EmbeddingBody",
    "GenerationBody",
    "JsonSchema",
    "LoadAdapterBody",
    "Message",
    "PromptFields",
    "Prompts",
    "RerankBody",
    "ResponseFormat",
    "ScoreBody",
    "StreamOptions",
    "StructuredOutputs",
    "Texts",
    "TokenizeBody",
    "TokenizeChatBody",
    "UnloadAdapterBody",
]


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("expected at least 1, or -1 for as many as the model takes")
    return value


_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_Token = Annotated[int, Field(ge=0, lt=2**31)]
_Kept = Annotated[
    int,
    Field(ge=-1, lt=2**31),
    AfterValidator(_not_zero),
    WithJsonSchema({"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1, "exclusiveMaximum": 2**31}]}),
]
_Bias = Annotated[float, Field(ge=-100.0, le=100.0)]

FUNCTION_NAME = r"[A-Za-z0-9_.-]{1,128}"
"""Regular expression of the names of functions."""

# The document of `openapi.py` describes these fields by the schemas here. They are validated elsewhere, with errors
# that name the place and without pydantic's copy of long lists.
_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT, "minItems": 1}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_NAME = {**_TEXT, "pattern": f"^{FUNCTION_NAME}$"}
_NAMED = {"type": "object", "required": ["name"], "properties": {"name": _NAME}}
_FUNCTION = {**_NAMED, "properties": {"name": _NAME, "description": _TEXT, "parameters": {"type": "object"}}}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_CALL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _NAMED},
}
Texts = Annotated[Any, WithJsonSchema({"anyOf": [_TEXT, _TEXTS]})]
"""A text or a list of texts."""
Prompts = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, _TEXTS, _TOKENS, {"type": "array", "items": _TOKENS, "minItems": 1}]})
]
"""A text, texts, token ids, or lists of token ids."""
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "items": _PART}]}
Message = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "anyOf": [
                {
                    "required": ["role", "content"],
                    "properties": {"role": {"enum": ["system", "developer", "user"]}, "content": _CONTENT},
                },
                {
                    "required": ["role"],
                    "properties": {
                        "role": {"const": "assistant"},
                        "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
                    },
                },
                {
                    "required": ["role", "content", "tool_call_id"],
                    "properties": {"role": {"const": "tool"}, "content": _CONTENT, "tool_call_id": _TEXT},
                },
            ],
        }
    ),
]
"""A message of a chat, whose further members the chat template may read."""
_Tool = Annotated[
    dict[str, Any], WithJsonSchema({**_CALL, "properties": {"type": {"const": "function"}, "function": _FUNCTION}})
]
_Document = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT,
                {"type": "object", "required": ["text"], "properties": {"text": _TEXT}, "additionalProperties": False},
            ]
        }
    ),
]
_STOP = {**_TEXT, "minLength": 1, "maxLength": MOST_STOP_CHARACTERS}
_Stop = Annotated[
    Any, WithJsonSchema({"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MOST_STOP_TEXTS}]})
]
_Choice = Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, _CALL]})]


class Body(BaseModel):
    """Unknown fields and values of another type are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """Additional contents of a stream.

    Attributes:
      include_usage: send a last chunk with token counts.
      continuous_usage_stats: include the counts so far in every chunk (vLLM).
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchema(BaseModel):
    """JSON Schema of an answer. It is enforced with and without `strict`; the name and description are ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """Format of an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    """The constraint of an answer as in vLLM.

    Attributes:
      json_: JSON Schema, as an object, a boolean or JSON text.
      json_object: True if any JSON object is valid.
      disable_fallback: accepted without effect, because llguidance is the only backend.
      disable_any_whitespace: True if JSON tokens follow each other without space.
      whitespace_pattern: regular expression of the space between JSON tokens.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


class GenerationBody(Body):
    """Fields of both text interfaces of OpenAI, including vLLM's additions.

    Attributes:
      stop: text or list of texts, checked by `sampling_params`.
      best_of: number of continuations to generate; the answer contains the `n` with the highest mean
        log-probability.
      truncate_prompt_tokens: number of last tokens of each prompt that are used; -1 uses as many as leave room for the
        continuation.
      allowed_token_ids: the only tokens of the answer. Without an end token among them, it ends at its token limit.
      bad_words: texts that the answer does not contain.
      request_id: suffix of the answer's id.
      vllm_xargs: logits processors to apply with their parameters, by name.
      response_format, structured_outputs, guided_json, guided_regex, guided_choice, guided_grammar: constraint of the
        answer, at most one, as read by `constraint_and_field`.
      user, safety_identifier, prompt_cache_key, metadata, session_id: notes of the client, which the server ignores.
    """

    n: Annotated[int, Field(ge=1, le=128)] = 1
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    seed: _Int64 | None = None
    stop: _Stop = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, _Bias] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[_Token] = []
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    truncate_prompt_tokens: _Kept | None = None
    allowed_token_ids: list[_Token] | None = None
    bad_words: list[str] = []
    vllm_xargs: dict[str, Any] = {}
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    priority: _Int64 = 0
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    metadata: dict[str, str] | None = None


class _Templated(Body):
    """Messages that the chat template renders to a prompt."""

    messages: list[Message] = Field(min_length=1)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[_Tool] = []
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    add_special_tokens: bool = False


class ChatBody(_Templated, GenerationBody):
    """`POST /v1/chat/completions`.

    Attributes:
      tool_choice: checked by `requested_tools`.
      include_reasoning: False omits the reasoning of the answer (vLLM).
    """

    tool_choice: _Choice = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class CompletionBody(GenerationBody):
    """`POST /v1/completions`.

    Attributes:
      prompt: a text, texts, token ids, or lists of token ids.
    """

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0)] | None = None
    add_special_tokens: bool = True


class PromptFields(Body):
    """Fields of requests for embeddings.

    Attributes:
      truncate_prompt_tokens: maximum number of tokens of each text, of which language models use the last and encoders
        the first; -1 is the maximum of the model. Without it, longer texts are refused.
      user: note of the client, which the server ignores.
    """

    truncate_prompt_tokens: _Kept | None = None
    add_special_tokens: bool = True
    user: str | None = None


class EmbeddingBody(PromptFields):
    """`POST /v1/embeddings`.

    Attributes:
      input: a text, texts, token ids, or lists of token ids.
      dimensions: number of first dimensions to return; None returns all.
      normalize: True if vectors have length 1 (vLLM); None does, unless an encoder's directory says otherwise.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    normalize: bool | None = None


class ScoreBody(PromptFields):
    """`POST /v1/score`; each field is a text or a list of texts."""

    text_1: Texts
    text_2: Texts


class RerankBody(PromptFields):
    """`POST /v1/rerank`.

    Attributes:
      documents: texts, or objects with a text.
      top_n: maximum number of documents to return.
      return_documents: returns the texts of the documents, too.
    """

    query: str
    documents: list[_Document] = Field(min_length=1)
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True


class LoadAdapterBody(Body):
    """`POST /v1/load_lora_adapter`.

    Attributes:
      lora_name: name that requests give as their model.
      lora_path: run trained with adapters, or PEFT directory, on the server's machine.
      load_inplace: True if an adapter of this name may be replaced.
    """

    lora_name: Annotated[str, Field(min_length=1, max_length=256)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False


class UnloadAdapterBody(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str


class UpdateWeightsBody(Body):
    """`POST /update_weights_from_disk`. SGLang's other fields are refused, and its `weight_version` is a text.

    Attributes:
      model_path: path of a checkpoint of the same model on the server's machine, such as a run that still trains. A
        format may precede it, as in `gguf:FILE`.
      weight_version: version of the weights; None increments the current one.
      kv: policy for running requests: "keep" the keys and values of the old weights, "recompute" them, or "abort".
    """

    model_path: Annotated[str, Field(min_length=1)]
    weight_version: Annotated[int, Field(ge=0)] | None = None
    kv: Literal["keep", "recompute", "abort"] = "keep"


class TokenizeBody(Body):
    """`POST /tokenize` of a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(_Templated):
    """`POST /tokenize` of messages."""

    return_token_strs: bool = False


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    tokens: list[_Token]
