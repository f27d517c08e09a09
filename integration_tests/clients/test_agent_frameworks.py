"""Agents of OpenAI's SDK, smolagents and LangGraph are trained with a game that needs a tool.

Each framework plays through its own client and stack-serve's chat server, in front of the policy's engine.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from safetensors.numpy import load_file, save_file

import stack_rl
from stack_rl.environments.agent import AgentAccess, AgentConfig
from stack_rl.groups import Group
from stack_rl.rollout_journal import RolloutJournal

from ..served import write_checkpoint

pytestmark = [
    pytest.mark.clients("agents", "langgraph", "langchain_openai", "smolagents"),
    pytest.mark.filterwarnings("default"),  # warnings of the frameworks are not errors of the run
]

CELLS, DIGITS = 3, 3
TIMEOUT_S = 300.0
"""Also of connections, for which clients otherwise wait 5 s: 32 episodes start at once."""
BEGIN, END = "<|assistant|>", "</s>"
LOOKS = [f'<tool_call>\n{{"name": "look", "arguments": {{"cell": {cell}}}}}\n</tool_call>' for cell in range(CELLS)]
ANSWERS = [
    f'<tool_call>\n{{"name": "final_answer", "arguments": {{"answer": "{digit}"}}}}\n</tool_call>'
    for digit in range(DIGITS)
]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages if m.role != 'system' %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    """<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>"""
    "{% endfor %}{{ eos_token }}{% endfor %}<|assistant|>"
)


def write_player(directory: Path, words: list[str]) -> None:
    """Writes a small Llama whose answers are one of `words`, at random, and then the end token."""
    write_checkpoint(directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    calls = [word for word in words if word not in vocab]
    # The last pairs of bytes give their places in the vocabulary to the calls.
    del tokenizer["model"]["merges"][-len(calls) :]
    places = sorted(vocab.values())[-len(calls) :]
    tokenizer["model"]["vocab"] = vocab = {token: place for token, place in vocab.items() if place not in places}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [
        {"id": place, "content": word, **flags} for place, word in zip(places, calls, strict=True)
    ]
    path.write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))

    # Feature 0 marks the token before an answer and makes the words equally likely. Feature 1 marks words and makes the
    # end likely.
    ids = dict(zip(calls, places, strict=True)) | {word: vocab[word] for word in words if word in vocab}
    tensors = load_file(directory / "model.safetensors")
    embeddings, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embeddings[:, :2], head[:, :2] = 0, 0
    embeddings[3, 0] = 4
    head[list(ids.values())] *= 0.1
    head[list(ids.values()), 0] = 8
    for each in ids.values():
        embeddings[each, 1] = 4
    head[1, 1] = 8
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


class Board:
    """The game of one episode: cells with hidden digits, to look at once before the answer.

    Attributes:
      looks: cells that were looked at.
    """

    def __init__(self, record: Any) -> None:
        self.digits, self.looks = record["digits"], list[int]()

    def look(self, cell: int) -> str:
        self.looks.append(cell)
        return str(self.digits[cell])

    def reward(self, answer: Any) -> float:
        """Returns 0.5 for a single look, and 0.5 if the answer is the digit that was seen."""
        is_single = len(self.looks) == 1
        return 0.5 * is_single + 0.5 * (is_single and str(answer).strip() == str(self.digits[self.looks[0]]))


SEEN: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
"""Prompt, answer and log-probabilities of each response, as the frameworks' clients received them."""
REQUESTED = {"logprobs": True, "return_token_ids": True}


def note(body: bytes) -> None:
    answer = json.loads(body)
    assert "choices" in answer, answer
    (choice,) = answer["choices"]
    logprobs = tuple(each["logprob"] for each in choice["logprobs"]["content"])
    SEEN.append((tuple(answer["prompt_token_ids"]), tuple(choice["token_ids"]), logprobs))


def note_response(response: Any) -> None:
    note(response.read())


async def note_response_async(response: Any) -> None:
    note(await response.aread())


async def openai_agents(access: AgentAccess, record: Any) -> float:
    import agents

    agents.set_tracing_disabled(True)
    board = Board(record)

    @agents.function_tool
    def look(cell: int) -> str:
        """Returns the digit in a cell."""
        return board.look(cell)

    http = openai.DefaultAsyncHttpxClient(timeout=TIMEOUT_S, event_hooks={"response": [note_response_async]})
    async with openai.AsyncOpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=TIMEOUT_S, http_client=http
    ) as client:
        agent = agents.Agent(
            "player",
            instructions="Find the digit in the cell.",
            tools=[look],
            model=agents.OpenAIChatCompletionsModel(access.model, client),
            model_settings=agents.ModelSettings(extra_body=REQUESTED),
        )
        try:
            result = await agents.Runner.run(agent, record["prompt"], max_turns=3)
        except agents.exceptions.AgentsException:  # such as a call of a cell that is not there
            return board.reward(None)
    return board.reward(result.final_output)


def langgraph(access: AgentAccess, record: Any) -> float:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    board = Board(record)

    @tool
    def look(cell: int) -> str:
        """Returns the digit in a cell."""
        return board.look(cell)

    with openai.DefaultHttpxClient(timeout=TIMEOUT_S, event_hooks={"response": [note_response]}) as http:
        model = ChatOpenAI(
            model=access.model,
            base_url=access.base_url,
            api_key=access.api_key,
            max_retries=0,
            timeout=TIMEOUT_S,
            http_client=http,
            extra_body=REQUESTED,
        ).bind_tools([look])
        graph = StateGraph(MessagesState)
        graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
        graph.add_node("tools", ToolNode([look]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        messages = graph.compile().invoke({"messages": [("user", record["prompt"])]})["messages"]
    return board.reward(messages[-1].content)


def smolagents(access: AgentAccess, record: Any) -> float:
    import smolagents

    board = Board(record)

    @smolagents.tool
    def look(cell: int) -> str:
        """Returns the digit in a cell.

        Args:
            cell: number of the cell.
        """
        return board.look(cell)

    with openai.DefaultHttpxClient(timeout=TIMEOUT_S, event_hooks={"response": [note_response]}) as http:
        model = smolagents.OpenAIModel(
            access.model,
            api_base=access.base_url,
            api_key=access.api_key,
            client_kwargs={"max_retries": 0, "timeout": TIMEOUT_S, "http_client": http},
            tool_choice="auto",  # a forced call is a constraint, whose answers are not trained
            extra_body=REQUESTED,
        )
        agent = smolagents.ToolCallingAgent([look], model, max_steps=2, verbosity_level=smolagents.LogLevel.OFF)
        return board.reward(agent.run(record["prompt"]))


def answers_of(trajectory: Any) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Returns the context, the tokens and the log-probabilities of each trained answer of an episode."""
    found = []
    starts = [*trajectory.branch_starts, len(trajectory.tokens)]
    for begin in trajectory.action_starts:
        first = max(each for each in starts if each <= begin)
        end = begin
        # Another answer begins after at least one observed token.
        while end < len(trajectory.tokens) and trajectory.sampled[end] and end not in starts[starts.index(first) + 1 :]:
            end += 1
        found.append(
            (
                tuple(trajectory.tokens[first:begin].tolist()),
                tuple(trajectory.tokens[begin:end].tolist()),
                tuple(trajectory.logprobs[begin:end].tolist()),
            )
        )
    return found


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    """The groups that the run's journal records, which it deletes after the last checkpoint."""
    recorded: list[Group] = []
    add = RolloutJournal.add

    def record(self: RolloutJournal, groups: list[Group]) -> None:
        recorded.extend(groups)
        add(self, groups)

    monkeypatch.setattr(RolloutJournal, "add", record)
    return recorded


@pytest.mark.parametrize(
    ("agent", "words", "seq_tokens", "engine"),
    [
        (openai_agents, [*LOOKS, *"012"], 256, "static"),
        (langgraph, [*LOOKS, *"012"], 256, "static"),
        (smolagents, [*LOOKS, *ANSWERS], 1024, "llm"),  # its requests have stop texts, which `static` refuses
    ],
)
def test_an_agent_learns_to_look_and_answer(
    tmp_path: Path,
    groups: list[Group],
    agent: Callable[[AgentAccess, Any], Any],
    words: list[str],
    seq_tokens: int,
    engine: str,
) -> None:
    SEEN.clear()
    (tmp_path / "player").mkdir()
    write_player(tmp_path / "player", words)
    source = random.Random(0)
    with (tmp_path / "records.jsonl").open("w") as file:
        for number in range(64):
            digits = [source.randrange(DIGITS) for _ in range(CELLS)]
            file.write(json.dumps({"prompt": str(number % CELLS), "digits": digits}) + "\n")
    stack_rl.train(
        f"hf:{tmp_path / 'player'}",
        AgentConfig(agent=agent, source=str(tmp_path / "records.jsonl"), max_tokens=2, max_turns=4),
        algorithm={"name": "dr_grpo", "entropy": 0.02},
        output=tmp_path / "run",
        data={"groups": 4, "group_size": 8, "seq_tokens": seq_tokens, "engine": engine},
        optimizer={"name": "adamw", "learning_rate": 0.005},
        run={"steps": 12},
    )
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    records = [each for each in lines if each["kind"] == "train"]
    rewards = [each["reward"] for each in records]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15, rewards
    # The trainer's log-probabilities of the recorded tokens are those of the sampler.
    assert max(each["largest_mismatch"] for each in records) < 1e-4

    # What is trained is what the clients received, token by token, in the contexts that the server reported.
    trained = [
        answer for group in groups for each in group.trajectories if each is not None for answer in answers_of(each)
    ]
    assert len(trained) == len(SEEN)
    for (context, tokens, logprobs), (prompt, sampled, reported) in zip(sorted(trained), sorted(SEEN), strict=True):
        assert (context, tokens) == (prompt, sampled)
        np.testing.assert_allclose(logprobs, reported, atol=1e-6)
