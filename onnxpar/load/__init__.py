"""Loading: from a file to the graph on which all passes work. Expands functions, takes branches,
converts old opsets, and rewrites loops, sequences, mixtures of experts and quirks of exporters."""
