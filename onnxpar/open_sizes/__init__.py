"""Models with open sizes: inferred at several bindings in lockstep."""
