"""Ranks: their processes and threads, the messages between them and their session, and runs."""
