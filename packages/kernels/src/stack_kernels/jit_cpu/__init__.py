"""Kernels in LLVM IR: machine code for this computer's processor, called by XLA's CPU backend; the extra `cpu` has it.

A kernel is a module with two functions, whose arguments are XLA's buffers: `@tiles` counts pieces of work that do not
depend on each other, `@tile` does one of them. `builder` helps to write them, `host` compiles them, and `xla_call.ll`
lets the threads of XLA's pool take one tile after the other. Each folder holds the kernels of one op.
"""
