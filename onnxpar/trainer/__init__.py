"""Training runs: the loop, data, checkpoints, merging."""
