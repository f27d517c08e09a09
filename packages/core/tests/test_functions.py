"""Functions that a config names are imported, or refused with the remedy."""

import pytest

from stack_core.abi.errors import ConfigError
from stack_core.functions import import_function


def test_a_file_of_the_current_directory_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'some_agent'\. Correct it"):
        import_function("some_agent:agent", label="Agent")
    (tmp_path / "some_agent.py").write_text("import absent_library\n")
    with pytest.raises(ConfigError, match=r"some_agent\.py is in the current directory: set PYTHONPATH=\."):
        import_function("some_agent:agent", label="Agent")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"No module named 'absent_library'\. Correct it"):
        import_function("some_agent:agent", label="Agent")
