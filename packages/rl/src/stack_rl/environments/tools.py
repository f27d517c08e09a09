"""`environment.name: tools`: prompts whose answers may call functions first."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from stack_core.abi.config import config
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.plugins import registries
from stack_core.text.message_parsers import MessageParser, ToolCall, choose_parser, parse_calls
from stack_core.text.parsers.hermes import HermesParser
from stack_rl.contracts import Completion, Environment, Reward, Tasks
from stack_rl.environments.messages import History, Message, MessageEnvironment, Reply, renderer_of
from stack_rl.environments.records import Record, read_records
from stack_rl.environments.tasks import ListedTasks
from stack_rl.environments.tool_execution import (
    EpisodeTools,
    ProcessExecution,
    ThreadExecution,
    ToolExecution,
    ToolFailed,
    ToolTimedOut,
)
from stack_rl.environments.tool_functions import Tool, read_tools
from stack_rl.environments.tool_results import ToolResult
from stack_rl.rewards.weighted import WeightedReward, as_weighted, check_reward, resolved, total_score
from stack_rl.threads import Threads

__all__ = ["ToolsConfig"]


@config
class ToolsConfig:
    """Prompts from JSONL files, as for `prompts`, and functions that the policy may call before its answer.

    A message with `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` calls functions; their results follow as
    messages with the role "tool". A result is a text, or an image if a function returns an image of Pillow. If the chat
    template shows another format of the registry `tool_parsers`, whose markers are not special tokens, calls have this
    format. A message without a call is the answer, which `rewards` score. Malformed calls, exceptions of a function and
    an exceeded time limit are reported to the policy, and the episode continues.

    A class is a tool with state: its public methods are tools, and each episode has an instance, which is created
    without arguments at the first call. A method `close` is called at the end of the episode.

    Attributes:
      source, rewards, held_out: as for `prompts`.
      tools: functions or classes as "module:name", or in Python the objects themselves; functions may be async. Their
        schemas are generated from annotations and docstrings.
      name: selects this environment.
      max_tokens: maximum number of tokens per message.
      max_turns: maximum number of messages of the policy, including the answer.
      tool_timeout_s: time limit of a call in seconds, from the start of the function.
      step_rewards: rewards of each message with calls, in addition to `rewards`. The reward is stored at the message's
        last token, from which `gae` computes advantages; other advantages use the sum of an episode's rewards. The
        text is the message, and the record has `tool_calls` and `tool_results` as well. The sum over an episode is the
        fact "step." and the reward's name.
      isolation: "process" runs tools in processes of their own, which import them and are killed after an exceeded time
        limit; each running episode with a class has one. "thread" runs tools in the trainer's process, in which a
        call that hangs cannot be stopped and keeps its thread.
      calls_at_once: maximum number of concurrent calls; with threads, of functions that are not async. Further calls
        wait.
      history: "exact" fails if the chat template rewrites earlier turns; "as_seen" keeps them as the policy saw them.
    """

    source: str
    rewards: Annotated[tuple[Annotated[WeightedReward, BeforeValidator(as_weighted)], ...], Field(min_length=1)]
    tools: Annotated[tuple[Any, ...], Field(min_length=1)]
    name: Literal["tools"] = "tools"
    held_out: str | None = None
    max_tokens: PositiveInt = 128
    max_turns: PositiveInt = 4
    tool_timeout_s: PositiveFloat = 30.0
    step_rewards: tuple[Annotated[WeightedReward, BeforeValidator(as_weighted)], ...] = ()
    isolation: Literal["process", "thread"] = "process"
    calls_at_once: PositiveInt = 32
    history: History = "exact"

    moved_keys: ClassVar[Mapping[str, str]] = MappingProxyType({"most_turns": "environment.max_turns"})

    def check(self, model: Any) -> None:
        for each in (*self.rewards, *self.step_rewards):
            check_reward(each.reward)
        self._execution(read_tools(self.tools))
        self._records()

    def build(self, policy: GenerativeCheckpoint, *, seq_tokens: int, seed: int) -> Tasks:
        tools = read_tools(self.tools)
        execution = self._execution(tools)
        schemas = [each.schema for each in tools.values()]
        renderer = renderer_of(policy, schemas)
        rewards, step_rewards = (
            [(*resolved(each.reward), each.weight) for each in several] for several in (self.rewards, self.step_rewards)
        )
        parser = functools.partial(_parser_of(policy), tools=schemas)
        limits = {"max_tokens": self.max_tokens, "max_turns": self.max_turns}

        def start(record: Record) -> Environment:
            conversation = _ToolConversation(
                record[1], execution.episode(), tuple(tools), parser, rewards, step_rewards
            )
            return MessageEnvironment(conversation, renderer, **limits, history=self.history)

        return ListedTasks(*self._records(), start=start, label=lambda record: record[0], renderer=renderer)

    def _execution(self, tools: Mapping[str, Tool]) -> ToolExecution:
        """Returns the execution of the tools.

        Raises:
          ConfigError: a process could not import a tool.
        """
        if self.isolation == "process":
            return ProcessExecution(tools, limit_s=self.tool_timeout_s, at_once=self.calls_at_once)
        return ThreadExecution(tools, self.tool_timeout_s, Threads(self.calls_at_once))

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


@dataclass
class _ToolConversation:
    """One conversation; `tools` executes the calls of `names`."""

    record: Mapping[str, Any]
    tools: EpisodeTools
    names: Sequence[str]
    parser: Callable[[], MessageParser]
    rewards: Sequence[tuple[str, Reward, float]]
    step_rewards: Sequence[tuple[str, Reward, float]] = ()
    _facts: dict[str, float] = field(default_factory=lambda: {"calls": 0.0, "tool_timeouts": 0.0})

    async def begin(self) -> Sequence[Message]:
        prompt = self.record["prompt"]
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt

    async def reply(self, text: str, *, is_finished: bool, tokens: tuple[int, ...]) -> Reply:
        parser = self.parser()
        content, calls = parse_calls(parser, text)
        results = [await self._called(each) for each in calls] if is_finished else []
        if is_finished and any(marker in content for marker in parser.markers):
            results.append(f"Error: a call is malformed; tools: {', '.join(self.names)}.")
        if results:
            self._facts["calls"] += len(results)
            made = [{"name": each.name, "arguments": each.arguments} for each in calls]
            step = self._completion(text, tokens, is_finished, {"tool_calls": made, "tool_results": results})
            score = await total_score(self.step_rewards, step)
            for name, value in score.facts.items():
                self._facts[f"step.{name}"] = self._facts.get(f"step.{name}", 0.0) + float(value)
            messages = [{"role": "tool", "content": each} for each in results]
            return Reply(messages=messages, reward=score.value, facts=dict(self._facts))
        score = await total_score(self.rewards, self._completion(text, tokens, is_finished, {}))
        facts = {**score.facts, **self._facts}
        return Reply(reward=score.value, verdict=score.verdict, facts=facts, parsed=score.parsed)

    async def _called(self, call: ToolCall) -> ToolResult:
        """Executes a call and returns its result; errors of the call become text for the policy."""
        try:
            arguments = json.loads(call.arguments)
            if call.name not in self.names:
                raise KeyError(call.name)
        except (ValueError, KeyError) as error:
            return f"Error: no such call ({type(error).__name__}: {error}); tools: {', '.join(self.names)}."
        try:
            return await self.tools.call(call.name, arguments)
        except ToolFailed as error:
            self._facts["tool_timeouts"] += isinstance(error, ToolTimedOut)
            return f"Error: {error}"

    def _completion(self, text: str, tokens: tuple[int, ...], is_finished: bool, more: Mapping[str, Any]) -> Completion:
        """Returns a message of the policy as rewards receive it."""
        prompt = self.record["prompt"]
        return Completion(
            prompt=prompt if isinstance(prompt, str) else json.dumps(prompt),
            text=text,
            tokens=tokens,
            is_finished=is_finished,
            record={**{key: value for key, value in self.record.items() if key != "prompt"}, **more},
        )

    async def close(self) -> None:
        await self.tools.close()
