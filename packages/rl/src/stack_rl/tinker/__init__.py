"""Training and sampling of adapters by the calls of the Tinker API, in process or over HTTP."""
