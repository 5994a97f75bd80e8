"""Strategies by rule: data-, tensor-, expert-parallel, and those of training steps."""
