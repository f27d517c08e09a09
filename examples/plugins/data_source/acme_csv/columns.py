"""`data: {source: csv:FILE#COLUMN}`: a column of a CSV file, one document per row."""

import csv
import hashlib
from pathlib import Path

from stack_core.abi.data import Document
from stack_core.abi.errors import DataError


class CsvSource:
    def __init__(self, address):
        path, _, self._column = address.partition("#")
        self._path = Path(path)
        if not self._path.is_file():
            raise DataError(f"There is no file {path}. Write csv:FILE#COLUMN.")

    def documents(self):
        with self._path.open(newline="", encoding="utf-8") as file:
            table = csv.DictReader(file)
            if self._column not in (table.fieldnames or ()):
                raise DataError(f"{self._path} has no column {self._column!r}; it has {table.fieldnames}.")
            for row in table:
                yield Document(f"{self._path}:{table.line_num}", row[self._column])

    def fingerprint(self):
        return hashlib.sha256(self._path.read_bytes() + self._column.encode()).hexdigest()
