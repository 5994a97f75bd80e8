"""The interface of passes: the context that passes share, the plan, the verification of layouts,
and the text of graphs."""
