"""Proves that the files of ranks compute a model, from the files alone."""
