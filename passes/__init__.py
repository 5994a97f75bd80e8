"""The passes of the compiler, one file each, in a folder for each stage; imported as
`onnxpar.passes`. A pass is known by its `name`; `planner/default_passes.py` has the order."""

if __name__ == "passes":
    raise ImportError("import onnxpar.passes: the top-level folder passes/ is not a package itself")
