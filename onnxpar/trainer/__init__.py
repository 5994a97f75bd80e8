"""Training runs: the loop, its data, checkpoints, and merging a checkpoint into the model."""
