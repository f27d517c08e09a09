"""How the next token is chosen, on the device."""
