import importlib

import pytest

from stack_core.testing import OpCheck, op_checks

OPS = ("attention", "gated_linear_unit", "linear", "linear_cross_entropy", "norm", "rope")
MANY_CHUNKS_OF_ATTENTION = ("odd_sizes", "broadcast_bias", "mask", "segment_pair", "sinks_and_empty_rows", "everything")
MANY_CHUNKS_OF_CROSS_ENTROPY = ("plain", "none", "ignored", "everything")


@pytest.mark.parametrize("check", [pytest.param(check, id=f"{op}-{check}") for op in OPS for check in op_checks(op)])
def test_reference_keeps_its_contract(check: OpCheck) -> None:
    check(importlib.import_module(f"stack_core.ops._{check.case.op}").REFERENCE)


@pytest.mark.parametrize("check", [c for c in op_checks("attention") if c.case.name in MANY_CHUNKS_OF_ATTENTION], ids=str)
def test_attention_in_many_chunks(check: OpCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = importlib.import_module("stack_core.ops._attention")
    monkeypatch.setattr(attention, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(attention, "_FEWEST_ROWS", 2)
    check(attention.REFERENCE)


@pytest.mark.parametrize(
    "check", [c for c in op_checks("linear_cross_entropy") if c.case.name in MANY_CHUNKS_OF_CROSS_ENTROPY], ids=str
)
@pytest.mark.parametrize("chunk_bytes", [1, 700])
def test_linear_cross_entropy_in_many_chunks(
    check: OpCheck, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cross_entropy = importlib.import_module("stack_core.ops._linear_cross_entropy")
    monkeypatch.setattr(cross_entropy, "_CHUNK_BYTES", chunk_bytes)
    check(cross_entropy.REFERENCE)
