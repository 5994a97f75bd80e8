"""Ranks on several hosts: one command that starts them, and what each host does."""
