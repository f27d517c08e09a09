# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#   "stack-core", "stack-kernels[cpu]", "stack-profile", "stack-quant", "stack-rl", "stack-serve", "stack-train",
# ]
# ///
"""Demonstrates the stack end to end with a small Llama trained on the Python standard library.

    python examples/quickstart.py [DIRECTORY]
    uv run --find-links dist examples/quickstart.py     # in a fresh environment, from the wheels of `nox -s dist`

The script trains, kills and resumes the run, then generates, aligns, profiles, quantizes, serves and exports the model.
It runs on the CPU in about three minutes and needs stack-core and stack-train; without another package it skips that
package's steps. The results stay in DIRECTORY, by default a new temporary directory.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).with_name("quickstart.yaml")
ALIGN = Path(__file__).with_name("quickstart_align.yaml")
STACK = (sys.executable, "-m", "stack_core")
PROMPT = "def read_file(path):\n"
NAMES = ("open", "close", "read", "write", "parse", "format", "copy", "send", "find", "remove", "load", "check")
POLL_S = 0.1
STARTED_S = time.monotonic()


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="stack-quickstart-")) / "run"
    profiled = ("--profile.first_step", "300", "--profile.steps", "5") if is_installed("profile") else ()
    train = (*STACK, "train", str(CONFIG), "--output", str(directory), *profiled)

    say("1. Train, and kill -9 the process soon after its first checkpoint.")
    kill_after_checkpoint(train, directory)

    say("2. Resume: the model, the optimizer, the data and the random numbers continue from the checkpoint.")
    summary = json.loads(subprocess.run([*train, "--resume", "--json"], check=True, stdout=subprocess.PIPE).stdout)

    say("3. Generate.")
    generate(directory)

    if begins("4. Align it with GRPO: functions that begin with a docstring are rewarded.", "rl"):
        align(directory, directory.with_name("run-aligned"))

    if begins("5. Profile steps 300 to 304.", "profile"):
        trace = directory / "profile"
        subprocess.run([*STACK, "profile", "ops", str(trace), "--by", "category"], check=True)
        subprocess.run([*STACK, "profile", "report", str(trace), "--out", str(directory / "profile.html")], check=True)

    served = directory
    if begins("6. Quantize to 8 bits.", "quant"):
        served = directory.with_name("run-w8a8")
        subprocess.run([*STACK, "quantize", str(directory), "--recipe", "w8a8", "--out", str(served)], check=True)

    if begins(f"7. Serve {served.name} over HTTP, and send a request of OpenAI's API.", "serve"):
        serve(served)

    if begins("8. Export the model's scores of texts as a bundle, which needs only core and serve.", "serve"):
        export(directory, directory.with_name("scores"))

    say(
        f"Validation loss {summary['validation_loss']:.3f} nats per token after {summary['step']} steps, "
        f"{summary['work_per_s']:,.0f} {summary['work_unit']}/s; {time.monotonic() - STARTED_S:.0f} s in all."
    )
    conclude(directory, served)


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(f"stack_{package}") is not None


def begins(step: str, package: str) -> bool:
    """Prints the heading of a step, and returns whether its package is installed."""
    say(step)
    if not is_installed(package):
        print(f"Skipped, because stack-{package} is not installed: pip install ./packages/{package}", flush=True)
    return is_installed(package)


def conclude(directory: Path, served: Path) -> None:
    """Prints links to the reports, and three commands to try next."""
    aligned = directory.with_name("run-aligned")
    reports = (directory / "report.html", aligned / "report.html", directory / "profile.html")
    print("Reports:", *(report.resolve().as_uri() for report in reports if report.exists()), sep="\n  ")
    stack = command()
    print("Next:")
    if is_installed("serve"):
        print(f"  {stack} serve {served} --port 8000    # OpenAI's interface at http://127.0.0.1:8000")
    else:
        print(f"  {stack} convert {directory} hf:exported    # for transformers")
    print(f'  {stack} generate {served} --prompt "class Tree" --max-tokens 60')
    print(f"  {stack} train {CONFIG} --output {directory.with_name('deeper')} --model.layers 4")


def command() -> str:
    """Returns the command `stack` of this environment, as a shell in this directory finds it."""
    program = Path(sys.executable).with_name("stack")
    if shutil.which("stack") == str(program):
        return "stack"
    return os.path.relpath(program) if program.is_relative_to(Path.cwd()) else str(program)


def generate(directory: Path) -> None:
    print(PROMPT, end="", flush=True)
    options = ("--max-tokens", "50", "--temperature", "0.7")
    subprocess.run([*STACK, "generate", str(directory), "--prompt", PROMPT, *options], check=True)


def align(directory: Path, aligned: Path) -> None:
    parts = {"source": NAMES[:-4], "held_out": NAMES[-4:]}
    environment = []
    for part, names in parts.items():
        path = directory.with_name(f"{part}.jsonl")
        prompts = (f"def {name}_{what}(self, {what}):\n" for name in names for what in ("file", "name", "data"))
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        environment += [f"--data.environment.{part}", str(path)]
    rewarded = {**os.environ, "PYTHONPATH": str(ALIGN.parent)}  # the YAML names the reward as a function of this module
    command = [*STACK, "train", str(ALIGN), "--run.init_from", str(directory), "--output", str(aligned), *environment]
    subprocess.run(command, check=True, env=rewarded)
    generate(aligned)


def documented(completion: Any) -> float:
    """The reward: 1 if the completion begins with a docstring whose first word is capitalized, else 0."""
    return float(re.match(r'\s*"""[A-Z][a-z]', completion.text) is not None)


def serve(directory: Path) -> None:
    sizes = ("--max-sequences", "1", "--step-tokens", "16")  # few programs to compile
    command = [*STACK, "serve", str(directory), "--port", "0", "--json", *sizes]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        ready = server.stdout.readline()
        if not ready:
            raise SystemExit(f"The server ended with status {server.wait()} before it was ready.")
        body = json.dumps({"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stop": "\n\n"}).encode()
        address = json.loads(ready)["address"] + "/v1/completions"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        print(PROMPT + answer["choices"][0]["text"], answer["usage"], sep="\n", flush=True)
    finally:
        server.terminate()
        server.wait()


def export(directory: Path, bundle: Path) -> None:
    sizes = ("--batch", "1", "--seq", "64", "--licence", "PSF-2.0")  # the licence of the training data
    subprocess.run([*STACK, "export", str(directory), str(bundle), *sizes], check=True)
    subprocess.run([*STACK, "bundle", "inspect", str(bundle)], check=True)
    subprocess.run([*STACK, "bundle", "verify", str(bundle)], check=True)


def kill_after_checkpoint(command: tuple[str, ...], directory: Path) -> None:
    process = subprocess.Popen(command)
    while not any(path.name.isdigit() for path in (directory / "checkpoints").glob("*")):
        if process.poll() is not None:
            raise SystemExit(f"Training ended with status {process.returncode} before its first checkpoint.")
        time.sleep(POLL_S)
    process.send_signal(signal.SIGKILL)
    process.wait()
    print("killed", flush=True)


def say(line: str) -> None:
    """Prints a heading with the minutes and seconds since the start."""
    minutes, seconds = divmod(round(time.monotonic() - STARTED_S), 60)
    print(f"\n=== {minutes}:{seconds:02} {line}", flush=True)


if __name__ == "__main__":
    main()
