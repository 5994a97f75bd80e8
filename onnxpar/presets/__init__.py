"""Presets: data-, tensor- and expert-parallel strategies, and those of training steps."""
