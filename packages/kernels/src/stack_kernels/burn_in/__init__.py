"""The first ten minutes on a new chip: contracts, tuning, speeds and a profile, each in a child process."""
