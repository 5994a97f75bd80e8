"""Models and their graphs: protos and graphsurgeon's graphs, tensors, bodies, shapes, checks, state
pairs, annotations, training steps; and models with open sizes, inferred at several sample sizes
together."""
