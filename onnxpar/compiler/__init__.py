"""What passes see and make: the context that they share, the plan, the verification of layouts, and
the text of graphs."""
