"""The interface of passes: the context that they share, the plan, verification, text."""
