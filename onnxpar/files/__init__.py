"""Writes files and folders that appear complete or not at all; digests detect later changes."""
