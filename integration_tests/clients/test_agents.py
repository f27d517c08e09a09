"""Frameworks of agents, and litellm, against `stack serve` of a tiny Llama whose answers are forced."""

import gc
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..forced import MESSAGES, TOOLS, write_forced_checkpoint
from ..served import KEY, Served

pytestmark = [
    pytest.mark.clients("litellm", "agents", "langgraph", "langchain_openai", "smolagents"),
    pytest.mark.filterwarnings("default"),  # warnings of the frameworks are not errors of the server
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("forced-llama")
    write_forced_checkpoint(directory)
    config = json.loads((directory / "config.json").read_text())
    # The frameworks' schemas of tools take hundreds of the tokenizer's tokens, which are bytes.
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    served = Served(directory, "--max-sequences", "2", "--step-tokens", "64", "--decode-repeats", "1")
    yield served
    assert "Traceback" not in served.stop()
    gc.collect()  # the frameworks leave sockets open, of which Python warns here, where warnings are no errors


@pytest.fixture
def calls() -> list[Any]:
    """The arguments of each call of a tool."""
    return []


def ask_litellm(served: Served, **options: Any) -> Any:
    import litellm

    return litellm.completion(
        f"hosted_vllm/{served.model}",
        MESSAGES,
        api_base=f"{served.address}/v1",
        api_key=KEY,
        tools=TOOLS,
        temperature=0,
        max_tokens=64,
        **options,
    )


def test_litellm_completes_with_tools(served: Served) -> None:
    (choice,) = ask_litellm(served).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("add", {"x": 17, "y": 25})
    assert second.function.name == "mul"


def test_litellm_streams_the_same_answer(served: Served) -> None:
    import litellm

    whole = ask_litellm(served)
    built = litellm.stream_chunk_builder(list(ask_litellm(served, stream=True)), messages=MESSAGES)
    assert built is not None
    assert built.choices[0].message.content == whole.choices[0].message.content
    described = [
        [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls]
        for answer in (built, whole)
    ]
    assert described[0] == described[1]


def test_litellm_names_an_unknown_model(served: Served) -> None:
    import litellm

    with pytest.raises(litellm.exceptions.NotFoundError, match="does not exist"):
        litellm.completion("hosted_vllm/other", MESSAGES, api_base=f"{served.address}/v1", api_key=KEY)


@pytest.mark.parametrize("api", ["chat_completions", "responses"])
def test_the_agents_sdk_calls_tools_and_answers(served: Served, calls: list[Any], api: str) -> None:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{served.address}/v1", api_key=KEY, max_retries=0)
    model = {
        "chat_completions": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }[api](served.model, client)

    @agents.function_tool
    def add(x: int, y: int) -> int:
        """Adds two integers."""
        calls.append(("add", x, y))
        return x + y

    @agents.function_tool
    def mul() -> int:
        """Multiplies."""
        calls.append(("mul",))
        return 42

    settings = agents.ModelSettings(temperature=0, max_tokens=64)
    agent = agents.Agent(
        "counts", instructions="Use the tools.", tools=[add, mul], model=model, model_settings=settings
    )
    result = agents.Runner.run_sync(agent, "17 + 25?")
    assert result.final_output == "It is 42."
    assert sorted(calls) == [("add", 17, 25), ("mul",)]


def test_langgraph_runs_a_graph_of_model_and_tools(served: Served, calls: list[Any]) -> None:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(x: int, y: int) -> int:
        """Adds two integers."""
        calls.append(("add", x, y))
        return x + y

    @tool
    def mul() -> int:
        """Multiplies."""
        calls.append(("mul",))
        return 42

    model = ChatOpenAI(
        model=served.model, base_url=f"{served.address}/v1", api_key=KEY, temperature=0, max_tokens=64, max_retries=0
    ).bind_tools([add, mul])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add, mul]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    *turns, last = graph.compile().invoke({"messages": [("user", "17 + 25?")]})["messages"]
    assert last.content == "It is 42."
    assert [message.type for message in turns] == ["human", "ai", "tool", "tool"]
    assert sorted(calls) == [("add", 17, 25), ("mul",)]
    streamed = [chunk.content for chunk in model.stream([("user", "17 + 25?")])]
    assert "".join(streamed) == "Let me see." and len(streamed) > 2


def test_smolagents_reads_a_chat_message_with_its_calls(served: Served) -> None:
    import smolagents

    model = smolagents.OpenAIModel(
        served.model, api_base=f"{served.address}/v1", api_key=KEY, temperature=0, max_tokens=64
    )

    @smolagents.tool
    def add(x: int, y: int) -> int:
        """Adds two integers.

        Args:
            x: one.
            y: the other.
        """
        return x + y

    message = model.generate([{"role": "user", "content": "17 + 25?"}], tools_to_call_from=[add], tool_choice="auto")
    assert [call.function.name for call in message.tool_calls or ()] == ["add", "mul"]
