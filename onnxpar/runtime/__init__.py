"""Runs a sharded model: ranks and their sessions of onnxruntime, their states and profiles, and the
launch of one command on several hosts."""
