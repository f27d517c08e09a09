from ..openai.conftest import serve

__all__ = ["serve"]
