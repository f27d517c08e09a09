"""This repository's engine behind its HTTP server, with a client in this process; runs in the benchmark's environment.

Usage: python stack_http.py HUGGING_FACE_DIR|RUN
"""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import httpx2

from serving.worker import Arrivals, Stream, arguments, serve
from serving.workload import Workload


def main() -> None:
    options = arguments()
    workload = Workload()
    stack = Path(sys.executable).with_name("stack")
    size = ["--max-tokens", str(workload.prompt_tokens + workload.new_tokens)]
    server = subprocess.Popen(
        [stack, "serve", options.model, "--port", "0", "--json", *size], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    address = json.loads(server.stdout.readline())["address"]

    def generate(prompts: list[list[int]], new_tokens: int) -> Arrivals:
        return asyncio.run(_generate(address, prompts, new_tokens))

    serve(generate, processes=[server.pid])
    server.terminate()
    server.wait()


async def _generate(address: str, prompts: list[list[int]], new_tokens: int) -> Arrivals:
    async with httpx2.AsyncClient(base_url=address, timeout=None) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        return await asyncio.gather(*(_stream(client, {**body, "prompt": prompt}) for prompt in prompts))


async def _stream(client: httpx2.AsyncClient, body: dict[str, object]) -> Stream:
    """One chunk a token, or one for several: those that came together have one time."""
    stream = Stream([], [])
    async with client.stream("POST", "/v1/completions", json={**body, "return_token_ids": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens = choice.get("token_ids") or []
                    stream.tokens.extend(tokens)
                    stream.times_s.extend([time.perf_counter()] * len(tokens))
    return stream


if __name__ == "__main__":
    main()
