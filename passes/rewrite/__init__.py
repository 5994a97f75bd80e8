"""Passes that rewrite the global graph before anything is decided."""
