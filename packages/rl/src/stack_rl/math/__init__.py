"""Post-training losses as pure functions of arrays, without models, configs or state."""
