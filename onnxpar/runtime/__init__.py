"""Ranks and their sessions, what they keep and tell, and one command on several hosts."""
