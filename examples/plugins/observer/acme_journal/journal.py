"""`journal.txt` in a run's directory: one line per event."""

import time


def journal(context):
    """Builds the observer of one run."""
    return Journal(context.directory / "journal.txt")


class Journal:
    """Writes each event when it happens. A resumed run appends to the same file."""

    def __init__(self, path):
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def observe(self, event):
        print(time.strftime("%F %T"), event, file=self._file)

    def close(self):
        self._file.close()
