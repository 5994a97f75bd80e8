"""The passes of the compiler, one file each; imported as `onnxpar.passes`."""

if __name__ == "passes":
    raise ImportError("import onnxpar.passes: the top-level folder passes/ is not a package itself")
