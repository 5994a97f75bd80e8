"""Ops that only move values keep every bit of them: the sign of zeros, and infinities."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.runtime.session.threads import ThreadSession

MOVES = {
    "y = Gather(t, i)": [[0, 3, 6], [-1, 2, 5]],
    "u = Transpose(t)  y = Gather<axis = 1>(u, i)": [[0, 3, 6], [-1, 2, 5]],
    "y = GatherND(t, i)": [[[0], [3]], [[-1], [5]]],
    "y = GatherElements(t, i)": [[0, 2, 4, 6], [-1, 1, 3, 5]],
}


@pytest.mark.matrix(8)
@pytest.mark.parametrize("fed", [False, True])
@pytest.mark.parametrize("type_", ["FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"])
@pytest.mark.parametrize("move", MOVES)
def test_signs_of_zeros(tmp_path: Path, move: str, type_: str, fed: bool) -> None:
    index = np.array(MOVES[move])
    sizes = ",".join(map(str, index.shape))
    given = f", int64[{sizes}] i" if fed else ""
    proto = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 21]>
        net (float[7,4] x{given}) => (float z) {{
            t = Cast<to = {onnx.TensorProto.DataType.Value(type_)}>(x)  {move}
            z = Cast<to = 1>(y) }}""")
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    if not fed:
        proto.graph.initializer.append(onnx.numpy_helper.from_array(index, "i"))
    onnx.save(proto, tmp_path / "m.onnx")
    x = np.random.default_rng(2).choice(np.array([-0.0, 0, -1, 2, np.inf], np.float32), (7, 4))
    x[::3] = -0.0
    feeds = {"x": x, **({"i": index} if fed else {})}
    unsplit = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (wanted,) = unsplit.run(None, feeds)
    for ranks in (2, 3):
        par, split = tmp_path / f"{ranks}.par", {"tensors": {"t": ["tp", None]}}
        plan = onnxpar.shard(tmp_path / "m.onnx", par, mesh=f"tp={ranks}", strategy=split)
        assert any(c.kind == "AllReduce" for c in plan.collectives)
        with ThreadSession(par) as session:
            (y,) = session.run(None, feeds)
        assert (y.view(np.int32) == wanted.view(np.int32)).all()
