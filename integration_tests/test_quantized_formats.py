"""The table of docs/quantized.md lists the formats of quantized checkpoints that stack-train reads."""

import re
from pathlib import Path

from stack_train.huggingface.compressed_tensors import FORMATS
from stack_train.huggingface.quantization import READERS

PAGE = Path(__file__).parents[1] / "docs" / "quantized.md"


def rows() -> list[list[str]]:
    """The cells of the table's rows, with the names in backticks alone for the first two columns."""
    lines = re.findall(r"^\| (`.*) \|$", PAGE.read_text(), re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [[*(re.sub("`", "", cell) for cell in row[:2]), *row[2:]] for row in cells if row[0] != "`quant_method`"]


def test_the_table_lists_what_is_read():
    read = [row for row in rows() if row[3] == "yes"]
    assert {row[0] for row in read} == set(READERS)
    assert {row[1] for row in read if row[0] == "compressed-tensors"} == set(FORMATS)
