"""ONNX protos to graphs and back: shapes, checks, state pairs, annotations, files."""
