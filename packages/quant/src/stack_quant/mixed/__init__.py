"""Mixed precision: the type of each parameter by its measured effect on the model's outputs and a budget of bytes."""
