"""`environment.name: tools`: prompts whose answers may call functions first."""

import asyncio
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, TypeAdapter

from stack_core.abi.config import config
from stack_core.abi.errors import ConfigError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.plugins import registries
from stack_core.text.message_parsers import MessageParser, ToolCall, choose_parser, parse_calls
from stack_core.text.parsers.hermes import HermesParser
from stack_rl.contracts import Completion, Environment, Reward, Tasks
from stack_rl.environments.functions import imported
from stack_rl.environments.messages import History, Message, MessageEnvironment, Reply, renderer_of
from stack_rl.environments.prompts import weighted
from stack_rl.environments.records import Record, read_records
from stack_rl.environments.tasks import ListedTasks
from stack_rl.rewards.weighted import WeightedReward, check_reward, resolved, total_score
from stack_rl.threads import Threads

__all__ = ["ToolsConfig"]


@config
class ToolsConfig:
    """Prompts from JSONL files, as for `prompts`, and functions that the policy may call before its answer.

    A message with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` calls functions; their results follow as
    messages with the role "tool". If the chat template shows another format of the registry `tool_parsers`, whose
    markers are not special tokens, calls have this format. A message without a call is the answer, which `rewards`
    score. Malformed calls and exceptions of a function are reported to the policy; a function that exceeds its time
    limit fails the episode.

    Attributes:
      source, rewards, held_out: as for `prompts`.
      tools: functions as "module:function", or in Python the functions themselves, which may be async. Their schemas
        are generated from annotations and docstrings.
      name: selects this environment.
      max_tokens: maximum number of tokens per message.
      most_turns: maximum number of messages of the policy, including the answer.
      tool_timeout_s: time limit of a call in seconds, from the start of the function.
      calls_at_once: maximum number of concurrent calls of non-async functions; further calls wait.
      history: handling of chat templates that rewrite earlier turns; see `MessageEnvironment`.
    """

    source: str
    rewards: Annotated[tuple[Annotated[WeightedReward, BeforeValidator(weighted)], ...], Field(min_length=1)]
    tools: Annotated[tuple[Any, ...], Field(min_length=1)]
    name: Literal["tools"] = "tools"
    held_out: str | None = None
    max_tokens: PositiveInt = 128
    most_turns: PositiveInt = 4
    tool_timeout_s: PositiveFloat = 30.0
    calls_at_once: PositiveInt = 32
    history: History = "exact"

    def check(self, model: Any) -> None:
        for each in self.rewards:
            check_reward(each.reward)
        self._functions()
        self._records()

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        functions = self._functions()
        schemas = [_schema(name, each) for name, each in functions.items()]
        renderer = renderer_of(policy, schemas)
        rewards = [(*resolved(each.reward), each.weight) for each in self.rewards]
        parser = functools.partial(_parser_of(policy), tools=schemas)
        threads = Threads(self.calls_at_once)
        limits = {"max_tokens": self.max_tokens, "most_turns": self.most_turns}

        def start(record: Record) -> Environment:
            tools = _ToolConversation(record[1], functions, parser, rewards, self.tool_timeout_s, threads)
            return MessageEnvironment(tools, renderer, **limits, history=self.history)

        return ListedTasks(*self._records(), start=start, label=lambda record: record[0], renderer=renderer)

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """Returns the tools by name.

        Raises:
          ConfigError: a tool cannot be imported or is not callable, or two tools have the same name.
        """
        found: dict[str, Callable[..., Any]] = {}
        for each in self.tools:
            name, function = (
                resolved(each) if callable(each) else (str(each).rpartition(":")[2], imported(each, label="Tool"))
            )
            if name in found:
                raise ConfigError(f"Two tools are called {name!r}; each needs a name of its own.")
            found[name] = function
        return found

    def _records(self) -> tuple[list[Record], list[Record]]:
        held_out = [] if self.held_out is None else read_records(self.held_out, "data.environment.held_out")
        return read_records(self.source, "data.environment.source"), held_out


def _parser_of(policy: GenerativeCheckpoint) -> type[MessageParser]:
    """Returns the parser of the template's format if its markers are in the decoded text, otherwise of `hermes`."""
    found = choose_parser(registries.tool_parsers, policy.chat_template)
    tokenizer = policy.tokenizer
    if found is None or tokenizer is None:
        return HermesParser
    decoded = (tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) for text in found.markers)
    return found if all(marker in text for marker, text in zip(found.markers, decoded, strict=True)) else HermesParser


def _schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the schema of a function for chat templates; a parameter without an annotation accepts anything."""
    parameters = inspect.signature(function).parameters.values()
    properties = {
        each.name: {} if each.annotation is each.empty else TypeAdapter(each.annotation).json_schema()
        for each in parameters
    }
    required = [each.name for each in parameters if each.default is each.empty]
    body = {"type": "object", "properties": properties, "required": required}
    description = inspect.getdoc(function) or ""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": body}}


@dataclass
class _ToolConversation:
    record: Mapping[str, Any]
    functions: Mapping[str, Callable[..., Any]]
    parser: Callable[[], MessageParser]
    rewards: Sequence[tuple[str, Reward, float]]
    timeout_s: float
    threads: Threads
    calls: int = 0

    async def begin(self) -> Sequence[Message]:
        prompt = self.record["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        parser = self.parser()
        content, calls = parse_calls(parser, text)
        results = [await self._called(each) for each in calls] if is_finished else []
        if is_finished and any(marker in content for marker in parser.markers):
            results.append(f"Error: a call is malformed; tools: {', '.join(self.functions)}.")
        if results:
            self.calls += len(results)
            return Reply(messages=[{"role": "tool", "content": each} for each in results])
        prompt = self.record["prompt"]
        completion = Completion(
            prompt=prompt if isinstance(prompt, str) else json.dumps(prompt),
            text=text,
            tokens=tokens,
            is_finished=is_finished,
            record={key: value for key, value in self.record.items() if key != "prompt"},
        )
        score = await total_score(self.rewards, completion)
        return Reply(reward=score.value, verdict=score.verdict, facts={**score.facts, "calls": float(self.calls)})

    async def _called(self, call: ToolCall) -> str:
        """Executes a call and returns its result as text; errors of the call become text for the policy.

        Raises:
          TimeoutError: the function exceeds its time limit.
        """
        try:
            function, arguments = self.functions[call.name], json.loads(call.arguments)
        except (ValueError, KeyError) as error:
            return f"Error: no such call ({type(error).__name__}: {error}); tools: {', '.join(self.functions)}."
        try:
            if inspect.iscoroutinefunction(function):
                async with asyncio.timeout(self.timeout_s):
                    return str(await function(**arguments))
            return str(await self.threads.run(functools.partial(function, **arguments), timeout_s=self.timeout_s))
        except TimeoutError as error:
            raise TimeoutError(f"the tool {call.name!r} did not return within {self.timeout_s:g} s") from error
        except Exception as error:  # Tools are user code; the policy sees their errors and can learn from them.
            return f"Error: {type(error).__name__}: {error}"

    async def close(self) -> None: ...
