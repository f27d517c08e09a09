"""What a program asks of hardware: its operations, costs, collectives, and what is wrong with it."""
