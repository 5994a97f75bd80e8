"""What users request for nodes and tensors: strategy files, annotations, presets, programs that are
written by hand."""
