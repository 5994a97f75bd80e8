"""Ranks: their processes and threads, the messages between ranks and their session, and how a rank
runs its graph."""
