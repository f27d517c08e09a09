"""Kernels in LLVM IR, compiled for the local processor and called by XLA's CPU backend; needs the extra `cpu`.

A kernel is a module with two functions, whose arguments are XLA's buffers: `@tiles` counts independent tiles of work,
and `@tile` computes one tile. `builder` helps to write them, `host` compiles them, and `xla_call.ll` distributes the
tiles over the threads of XLA's pool. Each folder holds the kernels of one op.
"""
