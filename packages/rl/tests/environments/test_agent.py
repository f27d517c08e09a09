"""The environment `agent` without a chat server; `integration_tests/test_agent_episodes.py` plays with one."""

import json

import pytest

from stack_core.abi.errors import UnknownName
from stack_core.abi.plugins import Plugins, Registries
from stack_rl.environments import agent_server
from stack_rl.environments.agent import AgentConfig


class NoPlugins(Plugins):
    def collect(self, kind):
        return {}, {}

    def reports(self):
        return ()


def test_a_missing_chat_server_is_named_with_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_server, "registries", Registries(NoPlugins()))
    records = tmp_path / "records.jsonl"
    records.write_text(json.dumps({"prompt": "2+3?"}))
    with pytest.raises(UnknownName, match=r"'openai' among chat_servers\..*serve.*provides it"):
        AgentConfig(agent=lambda access, record: 1.0, source=str(records)).check(None)
