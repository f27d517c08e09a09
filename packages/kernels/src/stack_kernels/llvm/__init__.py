"""What kernels in LLVM IR share: machine code for this computer's processor, called by XLA's CPU backend.

A kernel is a module with two functions, whose arguments are XLA's buffers: `@tiles` counts pieces of work that do not
depend on each other, `@tile` does one of them. `code` helps to write them, `host` compiles them, and `xla_call.ll` lets
the threads of XLA's pool take one tile after the other.
"""
