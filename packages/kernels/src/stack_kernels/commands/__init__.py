"""The subcommands of `stack` that stack-kernels provides."""
