"""The trainers that are measured side by side: one module each, which installs it and says how to start it."""
