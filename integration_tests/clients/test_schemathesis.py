"""Random bodies for every endpoint of `stack serve`, made by schemathesis from the server's OpenAPI document."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from stack_core.text.image_models import open_image_model

from ..forced import TEMPLATE
from ..served import Served, write_checkpoint
from ..test_image_generation import serving, write_pipeline

pytestmark = pytest.mark.clients("schemathesis", "openapi_spec_validator")

GENERATE = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/v1/rerank")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
# Random bodies are hardly ever answered: half get few optional fields, and most a known model, integers that look like
# ones, and messages that the chat template can render.
HOOKS = """
import schemathesis

NEEDED = {"messages", "model", "prompt", "input", "query", "documents", "text_1", "text_2", "tokens", "max_tokens"}

def tidied(value):
    if isinstance(value, dict):
        if value.get("role") == "tool":
            value = {"role": "user", "content": "hi"}
        if "role" in value:
            value = {name: each for name, each in value.items() if name in ("role", "content")}
            value["content"] = value.get("content") or "hi"
        return {name: tidied(each) for name, each in value.items()}
    if isinstance(value, list):
        return [tidied(each) for each in value]
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) % 320 if is_whole else value

@schemathesis.hook
def map_body(context, body):
    if not isinstance(body, dict):
        return body
    size = len(str(body))
    if isinstance(body.get("model"), str) and size % 8:
        body["model"] = "tiny"
    if isinstance(body.get("tool_choice"), dict) and size % 4:
        del body["tool_choice"]
    if body.get("stream") is not True:
        body.pop("stream_options", None)
    if "size" in body and size % 4:
        body["size"] = "auto"  # each size has programs of its own
    if size % 2:
        for place, name in enumerate(list(body)):
            if name not in NEEDED and (place + size) % 5:
                del body[name]
    return tidied(body) if size % 5 else body
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model that calls tools and speculates; clients may load adapters and put it to sleep."""
    directory = tmp_path_factory.mktemp("tiny-llama")
    write_checkpoint(directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": TEMPLATE}))
    options = ("--max-sequences", "8", "--step-tokens", "32", "--max-tokens", "96", "--speculation", "ngram")
    served = Served(directory, *options, "--sleep-mode", "--adapter-loading", "--model-name", "tiny")
    yield served
    assert "Traceback" not in served.stop()


def fuzz(address: str, folder: Path, *options: str) -> int:
    """Tries the endpoints with random bodies; returns how many requests were sent."""
    (folder / "fuzz_hooks.py").write_text(HOOKS)
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    assert program is not None, "schemathesis is not installed here"
    command = [program, "run", f"{address}/openapi.json", f"--checks={CHECKS}", "--phases=coverage,fuzzing"]
    limits = ["--seed=1", "--request-timeout=60", "--suppress-health-check=all", "--continue-on-failure"]
    environ = {**os.environ, "SCHEMATHESIS_HOOKS": "fuzz_hooks", "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [*command, *limits, "--warnings=off", *options],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated", done.stdout)
    assert found is not None, done.stdout
    return int(found[1])


@pytest.mark.parametrize(("examples", "at_least"), [(10, 2_000), pytest.param(600, 10_000, marks=pytest.mark.slow)])
def test_no_body_fails_the_server_and_all_pages_return(
    served: Served, tmp_path: Path, examples: int, at_least: int
) -> None:
    # A server that sleeps answers nothing else, so sleep is tried by itself.
    assert fuzz(served.address, tmp_path, f"--max-examples={examples}", "--exclude-path=/sleep") >= at_least
    answered = dict(
        re.findall(r'http_requests_total\{handler="([^"]+)",method="POST",status="200"\} (\S+)', served.metrics())
    )
    assert min(float(answered.get(path, 0)) for path in GENERATE) > examples / 20, answered
    served.wait_for_metric("vllm:num_requests_running", 0)
    assert served.metric("vllm:num_requests_waiting") == served.metric("vllm:kv_cache_usage_perc") == 0
    fuzz(served.address, tmp_path, "--max-examples=20", "--include-path-regex=^/(sleep|wake_up|is_sleeping)$")
    assert httpx2.post(f"{served.address}/wake_up").status_code == 200
    assert served.openai.completions.create(model="tiny", prompt="abc", max_tokens=2).usage.completion_tokens > 0


@pytest.mark.filterwarnings("ignore:.* reads 4 tokens")  # of prompts that are cut
@pytest.mark.parametrize(("examples", "at_least"), [(60, 100), pytest.param(10_000, 10_000, marks=pytest.mark.slow)])
def test_no_body_fails_the_server_of_images(tmp_path: Path, examples: int, at_least: int) -> None:
    directory = tmp_path / "images"
    write_pipeline(directory)
    model = open_image_model(f"hf:{directory}")
    with serving(model, api_keys=(), max_choices=2, max_steps=4, max_pixels=256) as (engine, client):
        address = str(client.base_url).removesuffix("/v1/")
        assert (
            fuzz(address, tmp_path, f"--max-examples={examples}", "--include-path=/v1/images/generations") >= at_least
        )
        assert (stats := engine.stats()).running == stats.waiting == 0
        assert len(client.images.generate(prompt="a ring", n=2).data) == 2


def test_the_document_is_openapi_3_1(served: Served) -> None:
    from openapi_spec_validator import OpenAPIV31SpecValidator

    # Raises if the document is invalid.
    OpenAPIV31SpecValidator(httpx2.get(f"{served.address}/openapi.json").json()).validate()
