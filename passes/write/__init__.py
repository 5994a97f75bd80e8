"""Passes that write the files of ranks."""
