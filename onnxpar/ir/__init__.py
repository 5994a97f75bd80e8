"""Views of a graph: tensors, collectives, bodies, copies, repetitions, training steps."""
