"""Passes that decide the layouts of all tensors."""
