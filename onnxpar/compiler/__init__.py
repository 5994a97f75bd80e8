"""The interface of passes: the context that passes share, the plan, verification, and the text of
graphs."""
