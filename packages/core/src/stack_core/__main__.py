"""`python -m stack_core` is the command `stack`."""

from stack_core.entry import main

if __name__ == "__main__":
    main()
