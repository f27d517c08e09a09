"""A server takes the weights of a run that trains on, and answers as a server that was started with them."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from stack_core.abi.model_formats import open_for_generation
from stack_core.cli import main
from stack_serve.llm.config import EngineConfig
from stack_serve.llm.engine import LLMEngine
from stack_serve.openai.app import make_app
from stack_serve.openai.config import OpenAIConfig
from stack_serve.openai.service import Service

SIZES = EngineConfig(max_sequences=1, max_tokens=48, step_tokens=16, decode_repeats=1)
MODEL = {"name": "llama", "vocab_size": 280, "layers": 1, "embed": 16, "heads": 2, "mlp": 24, "initializer_std": 0.5}


def answers(run: Path, *, train: Callable[[], None] | None = None) -> list[list[int]]:
    """Greedy tokens of a server of a run, and those after `train` and an update of the weights."""
    checkpoint = open_for_generation(str(run))
    service = Service(checkpoint, OpenAIConfig(weight_updates=True))

    async def ask(client: httpx2.AsyncClient, path: str, **body: Any) -> Any:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def talk(engine: LLMEngine) -> list[Any]:
        service.serve(engine)
        prompt = {"prompt": [7, 8, 9], "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        transport = httpx2.ASGITransport(make_app(service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            found = [await ask(client, "/v1/completions", **prompt)]
            if train is not None:
                train()
                await ask(client, "/update_weights_from_disk", model_path=str(run))
                found.append(await ask(client, "/v1/completions", **prompt))
        return [each["choices"][0]["token_ids"] for each in found]

    with LLMEngine(checkpoint, SIZES) as engine:
        return asyncio.run(talk(engine))


@pytest.mark.slow  # compiles two trainings and two servers
def test_a_server_takes_the_weights_of_a_run_that_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one two three four five six seven " * 40)
    data = {"source": "text:text.txt", "seq_tokens": 16, "batch_size": 4, "validation_fraction": 0.0}
    optimizer = {"learning_rate": 0.3}  # so high that the tokens differ after a step
    config = {"model": MODEL, "data": data, "optimizer": optimizer, "run": {"steps": 1}, "output": "run"}
    Path("run.yaml").write_text(yaml.safe_dump(config))
    main(["train", "run.yaml"])
    older, newer = answers(Path("run"), train=lambda: main(["train", "run.yaml", "--resume", "--run.steps", "2"]))
    assert [newer] == answers(Path("run")) and len(newer) == 12 and newer != older
