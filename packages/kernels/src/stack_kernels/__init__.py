"""Fast implementations of stack's ops for TPU, GPU and CPU, and the tables that choose among them."""
