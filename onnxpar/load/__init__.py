"""Loading: from a file to the graph that all passes see."""
