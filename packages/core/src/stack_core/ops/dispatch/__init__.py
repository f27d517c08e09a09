"""How a call finds its implementation: choosing, the forward and backward pass, mapping, splitting, explaining."""
