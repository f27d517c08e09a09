"""This repository's engine behind its HTTP server, with a client in this process; runs in the benchmark's environment.

Usage: python stack_http.py HUGGING_FACE_DIR|RUN|FORMAT:PATH --workload NAME
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from serving.completions import body_of, tokens_of
from serving.worker import Arrivals, Stream, arguments, serve
from stack_serve.client.endpoint import Endpoint


def main() -> None:
    options = arguments()
    workload = options.workload
    stack = Path(sys.executable).with_name("stack")
    size = ["--max-tokens", str(workload.prompt_tokens + workload.new_tokens)]
    server = subprocess.Popen(
        [stack, "serve", options.model, "--port", "0", "--json", *size], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    address = json.loads(server.stdout.readline())["address"]

    def generate(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        return asyncio.run(_generate(address, prompts, new_tokens))

    serve(generate, workload, processes=[server.pid])
    server.terminate()
    server.wait()


async def _generate(address: str, prompts: list[list[int]], new_tokens: int) -> Arrivals:
    async with Endpoint(address) as endpoint:
        model = (await endpoint.models())[0]
        return await asyncio.gather(*(_stream(endpoint, model, prompt, new_tokens) for prompt in prompts))


async def _stream(endpoint: Endpoint, model: str, prompt: list[int], new_tokens: int) -> Stream:
    """Tokens that came in one event have one time."""
    stream = Stream([], [])

    def receive(data: bytes, arrived_s: float) -> None:
        tokens = tokens_of(data)
        stream.tokens.extend(tokens)
        stream.times_s.extend([arrived_s] * len(tokens))

    await endpoint.stream("/completions", body_of(model, prompt, new_tokens), receive)
    return stream


if __name__ == "__main__":
    main()
