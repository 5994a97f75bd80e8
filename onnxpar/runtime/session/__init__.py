"""Sessions: open the folder of a sharded model, and run it like onnxruntime's InferenceSession."""
