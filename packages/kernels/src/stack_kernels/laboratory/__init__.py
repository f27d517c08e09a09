"""A laboratory without chips: implementations compiled for hardware that is not there, and what each takes of it."""
