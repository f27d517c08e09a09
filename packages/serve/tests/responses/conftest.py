from ..openai.conftest import serve, server, shared_server

__all__ = ["serve", "server", "shared_server"]
