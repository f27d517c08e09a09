"""Service of one model: parses request bodies and tracks whether the model accepts requests."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from stack_core.abi.engines import Engine
from stack_core.abi.errors import ChatTemplateError, ConfigError, GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import Constraint, EngineStats, SamplingParams
from stack_core.text.chat_template import ChatTemplate
from stack_core.text.detokenize import prompt_text
from stack_core.text.embeddings import embedding_settings_of, is_encoder
from stack_core.text.images import image_reader_of, place_images
from stack_serve.http.slices import maybe_in_thread
from stack_serve.http.traces import request_tracer
from stack_serve.llm.truncation import encoder_ending
from stack_serve.openai.application import ModelService
from stack_serve.openai.chat import ChatSerializer
from stack_serve.openai.completions import CompletionSerializer
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.constraints import constraint_and_field
from stack_serve.openai.errors import ApiError, as_api_error, bad_request
from stack_serve.openai.forced_calls import forced_calls
from stack_serve.openai.generation import Backend, Generation
from stack_serve.openai.images import ImageInput
from stack_serve.openai.logprobs import LogprobWriter, TokenTexts
from stack_serve.openai.messages import MessageFormat
from stack_serve.openai.metrics import Metrics
from stack_serve.openai.openapi import openapi_json
from stack_serve.openai.prompts import Prompt, Prompts
from stack_serve.openai.request import ApiRequest
from stack_serve.openai.response import GenerationResponse
from stack_serve.openai.restrictions import restriction_and_field
from stack_serve.openai.sampling import sampling_params
from stack_serve.openai.schemas import ChatBody, CompletionBody, GenerationBody, StreamOptions, TokenizeChatBody
from stack_serve.openai.serializer import Serializer
from stack_serve.openai.tools import check_results, requested_tools
from stack_serve.openai.updates import UpdateDispatcher
from stack_serve.parallel.reports import ReportsEngines

__all__ = ["ResponseForm", "Service"]


@dataclass(frozen=True)
class ResponseForm:
    """The form in which an interface answers chat requests.

    Attributes:
      id_prefix: beginning of the ids of answers.
      make_serializer: makes the serializer of the response to a request.
    """

    id_prefix: str
    make_serializer: Callable[[ApiRequest], ChatSerializer]


_IMAGE_SIZE = 2**20
CHAT_FORM = ResponseForm("chatcmpl-", ChatSerializer)


class Service(ModelService[OpenAIConfig, Metrics]):
    """A served language model; used on one event loop.

    Attributes:
      max_tokens: maximum length of a prompt with its continuation.
      embedding: settings of embeddings that the checkpoint recommends.
      is_encoder: True if the model can only embed texts.

    Args:
      max_tokens: maximum length; None uses the model's `max_positions`.
      adapters: names of the engine's adapters.
      engines: number of engines behind the one that `serve` gets.

    Raises:
      ConfigError: an adapter has the model's name, or a setting does not apply to an encoder.
      GenerationError: the chat template cannot be read.
      UnknownName: no parser has the configured name.
    """

    def __init__(
        self,
        checkpoint: GenerativeCheckpoint,
        config: OpenAIConfig,
        max_tokens: int | None = None,
        adapters: Sequence[str] = (),
        *,
        engines: int = 1,
    ) -> None:
        super().__init__(config.model_names or (checkpoint.name,), config)
        if taken := set(self.names).intersection(adapters):
            raise ConfigError(f"The model and an adapter are both called {taken.pop()!r}. Name the adapter otherwise.")
        self.max_tokens = min(max_tokens or checkpoint.max_positions, checkpoint.max_positions)
        self.embedding = embedding_settings_of(checkpoint)
        self.is_encoder = is_encoder(checkpoint)
        if self.is_encoder:
            _check_of_encoder(checkpoint.name, config)
        ending = encoder_ending(checkpoint)
        self.prompts = Prompts(checkpoint.tokenizer, checkpoint.vocab_size, self.max_tokens, ending)
        self.metrics = Metrics(self.names[0], self.max_tokens, self.engine_stats, engines=engines)
        self.token_texts = None if checkpoint.tokenizer is None else TokenTexts(checkpoint.tokenizer)
        # Read now, because a wrong template should fail before the weights are loaded.
        source = _template_source(checkpoint, config)
        reader = image_reader_of(checkpoint)
        if config.remote_images and reader is None:
            raise ConfigError(f"remote_images: {checkpoint.name!r} does not read images. Leave it out.")
        self._images = ImageInput(reader, config.remote_images, config.max_body_bytes, self.max_tokens)
        special_tokens, images = checkpoint.special_tokens, reader is not None
        self._template = None if source is None else ChatTemplate(source, special_tokens, images=images)
        parsers = {"tool_parser": config.tool_parser, "reasoning_parser": config.reasoning_parser}
        self._format = MessageFormat(source, checkpoint.tokenizer, **parsers)
        self._end_tokens = frozenset(checkpoint.end_tokens)
        self._defaults = dict(checkpoint.sampling_defaults)
        self._adapters = tuple(adapters)
        self._backend: Backend | None = None

    def serve(self, engine: Engine) -> None:
        """Takes requests from now on; called on the event loop."""
        # Created here, because the engine's threads must wake the loop that serves requests.
        dispatcher = UpdateDispatcher(asyncio.get_running_loop())
        tracer = request_tracer() if self.config.traces else None
        self._backend = Backend(engine, dispatcher, self.metrics, self.config.timeout_s, tracer)
        self.state = "ready"

    def stats(self) -> EngineStats | None:
        """The engine's counts, once there is one."""
        return self._backend.engine.stats() if self._backend is not None else None

    def engine_stats(self) -> Sequence[EngineStats | None]:
        """Returns the counts of each engine; empty before there is one."""
        engine = None if self._backend is None else self._backend.engine
        if isinstance(engine, ReportsEngines):
            return engine.engine_stats()
        return [] if engine is None else [engine.stats()]

    def check_engines(self) -> None:
        engine = None if self._backend is None else self._backend.engine
        if isinstance(engine, ReportsEngines) and not engine.running_engines:
            message = "The engine has ended and starts again; see the log of the server for the cause."
            raise ApiError(503, message, code="restarting", headers={"Retry-After": "5"})

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of adapters, which clients use as model names."""
        engine = None if self._backend is None else self._backend.engine
        return self._adapters if engine is None else engine.adapters

    def cut_short(self) -> None:
        """Aborts running requests; clients receive an error."""
        if self._backend is not None:
            for generation in list(self._backend.running):
                generation.cut_short()

    def check_base_model(self, name: str | None) -> str:
        """Returns the model name for an answer that only the base model can give.

        Raises:
          ApiError: the requested model is not served, or is an adapter.
        """
        name = self.check_model(name)
        if name in self.adapters:
            message = (
                f"The model {name!r} is an adapter; embeddings are computed by the base model. Name {self.names[0]!r}."
            )
            raise bad_request(message, param="model")
        return name

    def check_generates(self) -> None:
        """Raises an ApiError if the model is an encoder."""
        if self.is_encoder:
            raise bad_request(
                f"The model {self.names[0]!r} is an encoder: it embeds texts and generates none. Use /v1/embeddings, "
                "/v1/score or /v1/rerank.",
                param="model",
            )

    async def chat(self, body: ChatBody, request_id: str, form: ResponseForm = CHAT_FORM) -> GenerationResponse:
        """Returns the answer to messages in the form of an interface."""
        model = self.check_model(body.model)
        self.check_generates()
        _check_streaming(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true beside it.", param="top_logprobs")
        # OpenAI renamed the field; clients that send equal values under both names are served.
        asked = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(asked) > 1:
            raise bad_request("max_tokens and max_completion_tokens differ; give the latter alone.", param="max_tokens")
        max_tokens = next(iter(asked), None)
        tools = requested_tools(body.tools, body.tool_choice)
        constraint, field = constraint_and_field(body)
        forced = forced_calls(tools, body.tool_choice, parallel=body.parallel_tool_calls)
        if forced is not None:
            if field is not None:
                raise bad_request(f"tool_choice and {field} both constrain the answer; give one of them.", param=field)
            constraint, field = forced.constraint, "tools"
        if body.bad_words and self._format.has_special_markers():
            raise bad_request(
                "bad_words excludes special tokens, by which this model marks its reasoning or calls. Use logit_bias.",
                param="bad_words",
            )
        structure = constraint
        constraint, field = self._restricted(body, constraint, field)
        sampling = sampling_params(
            body,
            self._defaults,
            max_tokens=max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            constraint=constraint,
        )
        sampling = self._without_end(body, sampling)
        prompt = await self.chat_prompt(body, tools, parses_calls=forced is None)
        if body.truncate_prompt_tokens is not None:
            last = self.prompts.truncated(prompt, body.truncate_prompt_tokens, max_tokens or 1)
            prompt = replace(last, text=prompt.text)  # which shows whether the answer begins with reasoning
        markers = None if structure is None else self._format.reasoning_markers(body, prompt)
        if structure is not None and markers is not None:  # the constraint begins after the reasoning
            constraint = replace(structure, reasoning_begin=markers[0], reasoning_end=markers[1])
            sampling = replace(sampling, constraint=constraint)
        await self._compile(constraint, field)
        calls = None if structure is not None else self._format.calls(tools)
        start_parsing, sampling = self._format.parsing(
            body,
            prompt,
            sampling,
            make_calls=calls if forced is None else forced.parser,
            has_reasoning=structure is None or markers is not None,
        )
        asked_as = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self.prompts.check_room(prompt, max_tokens, "messages", max_tokens_param=asked_as)
        # Without a generation prompt, the last message is continued in its own role.
        role = "assistant" if body.add_generation_prompt else body.messages[-1]["role"]
        request = self._request(body, model, (prompt,), sampling, request_id)
        names = {"max_tokens": asked_as, "prompt": "messages", "logprobs": "top_logprobs"}
        names |= {} if field is None else {"constraint": field}
        request = replace(request, id=f"{form.id_prefix}{request.id}", role=role, start_parsing=start_parsing)
        return self._respond(form.make_serializer(request), names)

    def sets_effort(self) -> bool:
        """Returns whether the chat template has a variable for the effort of reasoning."""
        try:
            return self._template is not None and bool(self._template.effort_variables("medium"))
        except ChatTemplateError:
            return False

    @property
    def reasons(self) -> bool:
        """True if a reasoning parser is in use."""
        return self._format.has_reasoning

    async def chat_prompt(
        self,
        body: ChatBody | TokenizeChatBody,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        parses_calls: bool = True,
    ) -> Prompt:
        """Renders messages to a prompt with the chat template.

        Args:
          tools: tools that the model may call.
          parses_calls: True parses the model's calls in the format of its chat template.

        Raises:
          ApiError: the model lacks a template, or the template rejects the messages.
        """
        self.check_generates()
        if self._template is None:
            raise bad_request(
                "The model has no chat template. Use /v1/completions, or start the server with --chat-template FILE.",
                param="messages",
            )
        check_results(body.messages)
        if tools is not None:
            self._template.options_of({"tools": tools})
            if parses_calls:
                self._format.check_tools()
        render = partial(
            self._template.render,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=_variables(body, self._template),
            tools=tools,
        )
        text, images = await maybe_in_thread(_size(body.messages), self._images.render, render, body.messages)
        prompt = await self.prompts.of_text(text, add_special_tokens=body.add_special_tokens)
        if self._images.reader is None:
            return prompt
        # Hashing takes 1 ms for 1 MB, in which the event loop would serve no one.
        size = len(prompt.tokens) + sum(image.pixels.nbytes for image in images)
        placed = await maybe_in_thread(size, place_images, prompt.tokens, self._images.reader, images)
        return replace(prompt, images=placed)

    async def complete(self, body: CompletionBody, request_id: str) -> GenerationResponse:
        """The answer to prompts."""
        model = self.check_model(body.model)
        self.check_generates()
        _check_streaming(body)
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("max_tokens is 0, which needs echo: true. Ask for a token.", param="max_tokens")
        # OpenAI's echo with logprobs and vLLM's prompt_logprobs need the same figures; the larger count serves both.
        echoed = body.logprobs if body.echo else None
        constraint, constraint_field = self._restricted(body, *constraint_and_field(body))
        sampling = sampling_params(
            body,
            self._defaults,
            # The engine generates at least one token; `nothing_new` removes it from the answer.
            max_tokens=body.max_tokens or 1,
            logprobs=body.logprobs,
            prompt_logprobs=max((most for most in (body.prompt_logprobs, echoed) if most is not None), default=None),
            constraint=constraint,
        )
        sampling = self._without_end(body, sampling)
        await self._compile(constraint, constraint_field)
        most = max(1, self.config.max_choices // sampling.n)
        field = body.prompt
        prompts = await self.prompts.of_field(
            field,
            max_prompts=most,
            add_special_tokens=body.add_special_tokens,
            keep_tokens=body.truncate_prompt_tokens,
            reserved_tokens=body.max_tokens or 1,
        )
        size = sum(len(each.tokens) for each in prompts)
        await maybe_in_thread(size, self._check_room, prompts, body.max_tokens)
        request = replace(
            self._request(body, model, prompts, sampling, request_id),
            echo=await maybe_in_thread(size, self._texts_of, prompts) if body.echo else (),
            nothing_new=body.max_tokens == 0,
            operation="text_completion",
        )
        names = {} if constraint_field is None else {"constraint": constraint_field}
        return self._respond(CompletionSerializer(replace(request, id=f"cmpl-{request.id}")), names)

    def _restricted(
        self, body: GenerationBody, constraint: Constraint | None, field: str | None
    ) -> tuple[Constraint | None, str | None]:
        """Returns the constraint and its field, or without a constraint the restriction of the tokens or texts.

        Raises:
          ApiError: the request has both, or the restriction is invalid.
        """
        restriction, restricting = restriction_and_field(body, self.prompts.known)
        if restriction is None:
            return constraint, field
        if constraint is not None:
            shown = "tool_choice" if field == "tools" else field
            raise bad_request(f"{shown} and {restricting} both constrain the answer; give one.", param=restricting)
        return restriction, restricting

    def _without_end(self, body: GenerationBody, sampling: SamplingParams) -> SamplingParams:
        """Excludes the end tokens if the request allows other tokens only."""
        tokens = body.allowed_token_ids
        return (
            sampling if tokens is None or self._end_tokens.intersection(tokens) else replace(sampling, ignore_eos=True)
        )

    async def _compile(self, constraint: Constraint | None, field: str | None) -> None:
        """Compiles a constraint in a thread, because it may block for a second.

        Raises:
          ApiError: it cannot be compiled. The error names the field of the body.
        """
        if constraint is None or field is None:
            return
        engine = self.backend.engine
        try:
            await asyncio.to_thread(engine.compile_constraint, constraint)
        except GenerationError as error:
            raise as_api_error(error, {"constraint": field}) from None

    def _check_room(self, prompts: Sequence[Prompt], max_tokens: int | None) -> None:
        for prompt in prompts:
            self.prompts.check_room(prompt, max_tokens, "prompt")

    def _texts_of(self, prompts: Sequence[Prompt]) -> tuple[str, ...]:
        tokenizer = self.prompts.needed_tokenizer()
        return tuple(
            prompt_text(tokenizer, prompt.tokens) if prompt.text is None else prompt.text for prompt in prompts
        )

    def _request(
        self,
        body: ChatBody | CompletionBody,
        model: str,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        request_id: str,
    ) -> ApiRequest:
        return ApiRequest(
            id=body.request_id or request_id,
            model=model,
            adapter=model if model in self.adapters else None,
            prompts=tuple(prompts),
            sampling=sampling,
            texts=LogprobWriter(self.token_texts, as_ids=body.return_tokens_as_token_ids),
            tokenizer=self.prompts.tokenizer,
            priority=body.priority,
            stream=body.stream,
            stream_options=body.stream_options or StreamOptions(),
            # With best_of, more continuations are generated than returned.
            best=body.n if sampling.n > body.n else None,
            # A count in completions, where 0 requests the sampled token's; a boolean in chat.
            wants_logprobs=body.logprobs is not None and body.logprobs is not False,
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            wants_token_ids=body.return_token_ids,
        )

    def _respond(self, serializer: Serializer, names: Mapping[str, str]) -> GenerationResponse:
        generation = Generation(serializer.request, self.backend)
        return GenerationResponse(serializer, generation, names=names)

    @property
    def backend(self) -> Backend:
        """The engine and the state of its requests.

        Raises:
          ApiError: the server is starting or shutting down.
        """
        self.check_ready()
        assert self._backend is not None, "a ready service has an engine"
        return self._backend

    def resume(self) -> None:
        """Accepts requests again after the engine slept, unless the server shuts down."""
        if self.state == "sleeping":
            self.state = "ready"

    def openapi(self) -> bytes:
        return openapi_json(has_keys=bool(self.config.api_keys))

    def model_card(self, name: str) -> dict[str, Any]:
        return {
            **super().model_card(name),
            "root": name if name in self.adapters else self.names[0],
            "parent": self.names[0] if name in self.adapters else None,
            "max_model_len": self.max_tokens,
        }


def _check_of_encoder(name: str, config: OpenAIConfig) -> None:
    """Raises a ConfigError about generation settings, which do not apply to an encoder."""
    settings = ("chat_template", "tool_parser", "reasoning_parser", "adapter_loading", "sleep_mode", "remote_images")
    default = OpenAIConfig()
    changed = [each for each in (*settings, "stored_responses") if getattr(config, each) != getattr(default, each)]
    if changed:
        raise ConfigError(f"{', '.join(changed)}: {name!r} is an encoder, which generates no text. Leave them out.")


def _size(messages: Sequence[Mapping[str, Any]]) -> int:
    """Estimates the size of messages: their characters, plus a constant for each message."""
    contents = [message.get("content") for message in messages]
    # Images are decoded, and perhaps fetched.
    images = _IMAGE_SIZE * sum("image_url" in part for part in _parts(contents))
    return 64 * len(messages) + images + sum(len(each) for each in contents if isinstance(each, (str, list)))


def _parts(contents: Sequence[Any]) -> list[Mapping[str, Any]]:
    return [part for each in contents if isinstance(each, list) for part in each if isinstance(part, Mapping)]


def _check_streaming(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options needs stream: true beside it.", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs comes with whole answers only. Leave stream out.", param="prompt_logprobs")


def _variables(body: ChatBody | TokenizeChatBody, template: ChatTemplate) -> dict[str, Any]:
    """Returns the variables of the chat template that a body sets."""
    effort: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        effort = template.effort_variables(body.reasoning_effort)
    if both := effort.keys() & body.chat_template_kwargs:
        raise bad_request(
            f"reasoning_effort sets {both.pop()}, which chat_template_kwargs sets too. Leave one of them out.",
            param="reasoning_effort",
        )
    return {**body.chat_template_kwargs, **effort}


def _template_source(checkpoint: GenerativeCheckpoint, config: OpenAIConfig) -> str | None:
    if config.chat_template is None:
        return checkpoint.chat_template
    try:
        return config.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GenerationError(f"The chat template cannot be read: {error}. Name another file.") from error
