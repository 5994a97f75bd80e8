"""Loading: from a file to the graph that all passes see. Rewrites functions, branches, sequences,
old opsets, mixtures of experts, and quirks of exporters."""
