"""One update of a model: the pure step, its state and precision, and the program that places and compiles the step."""
