"""Export classical models by scikit-learn, XGBoost and LightGBM, with what these libraries predict.

`python models/ml/export.py` writes every NAME.onnx next to this script, and NAME.npz, which has
inputs (`feed.*`) and the predictions of the library itself (`want.*`, by name of the output).
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import onnx
import pandas as pd
import xgboost
from onnxmltools import convert_lightgbm, convert_xgboost
from onnxmltools.convert.common.data_types import FloatTensorType as ToolsFloat
from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType, StringTensorType
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC, SVR

FOLDER = Path(__file__).parent
OPSETS = {"": 18, "ai.onnx.ml": 3}
ROWS = 23
"""Rows of the inputs that are fed: no multiple of a number of ranks."""

RNG = np.random.default_rng(0)
X = RNG.standard_normal((300, 6)).astype(np.float32)
LEVEL = (X[:, 0] > 0).astype(int) + (X[:, 1] * X[:, 2] > 0)
NAMES = np.array(["low", "mid", "high"])[LEVEL]
TARGET = X[:, 0] * X[:, 1] + np.abs(X[:, 2])
FEW = X[:ROWS]


def write(
    name: str, model: onnx.ModelProto, feed: Mapping[str, Any], want: Mapping[str, Any]
) -> None:
    """Writes a model with its inputs and the expected outputs."""
    onnx.save(model, FOLDER / f"{name}.onnx")
    arrays = {f"feed.{k}": v for k, v in feed.items()} | {f"want.{k}": v for k, v in want.items()}
    with (FOLDER / f"{name}.npz").open("wb") as file:
        np.savez_compressed(file, **arrays)


def forest_classifier() -> None:
    """A random forest with labels that are strings; probabilities by ZipMap."""
    model = RandomForestClassifier(n_estimators=11, max_depth=5, random_state=0).fit(X, NAMES)
    want = {"label": model.predict(FEW).astype(str), "probabilities": model.predict_proba(FEW)}
    write("forest_classifier", to_onnx(model, X[:1], target_opset=OPSETS), {"X": FEW}, want)


def boosted_regressor() -> None:
    """Gradient boosting: 14 trees and a base value."""
    model = GradientBoostingRegressor(n_estimators=14, max_depth=3, random_state=0).fit(X, TARGET)
    want = {"variable": model.predict(FEW)}
    write("boosted_regressor", to_onnx(model, X[:1], target_opset=OPSETS), {"X": FEW}, want)


def svm_classifier() -> None:
    """A support vector machine of three classes with probabilities; 5 support vectors a row."""
    model = SVC(probability=True, random_state=0).fit(X, LEVEL)
    made = to_onnx(model, X[:1], target_opset=OPSETS, options={"zipmap": False})
    want = {"label": model.predict(FEW), "probabilities": model.predict_proba(FEW)}
    write("svm_classifier", made, {"X": FEW}, want)


def svm_regressor() -> None:
    """A support vector regression with a polynomial kernel."""
    model = SVR(kernel="poly").fit(X, TARGET)
    want = {"variable": model.predict(FEW)}
    write("svm_regressor", to_onnx(model, X[:1], target_opset=OPSETS), {"X": FEW}, want)


def pipeline_of_strings() -> None:
    """Columns of numbers with gaps and of strings: imputed, scaled, one-hot, then classified."""
    count = len(X)
    table = pd.DataFrame(
        {
            "age": X[:, 0],
            "income": X[:, 1],
            "city": np.array(["Rome", "Oslo", "Lima"])[RNG.integers(0, 3, count)],
            "job": np.array(["cook", "nurse", ""], object)[RNG.integers(0, 3, count)],
        }
    )
    table.loc[::7, "age"] = np.nan
    numbers = make_pipeline(SimpleImputer(), StandardScaler())
    texts = make_pipeline(
        SimpleImputer(strategy="most_frequent", missing_values=""),
        OneHotEncoder(handle_unknown="ignore"),
    )
    prepared = ColumnTransformer(
        [("numbers", numbers, ["age", "income"]), ("texts", texts, ["city", "job"])]
    )
    model = Pipeline([("prepared", prepared), ("classified", LogisticRegression())])
    model.fit(table, np.where(LEVEL > 0, "yes", "no"))
    types = [(name, FloatTensorType([None, 1])) for name in ("age", "income")]
    types += [(name, StringTensorType([None, 1])) for name in ("city", "job")]
    made = to_onnx(model, initial_types=types, target_opset=OPSETS)
    few = table[:ROWS]
    feed = {n: few[[n]].to_numpy(np.float32) for n in ("age", "income")}
    feed |= {n: few[[n]].to_numpy(str) for n in ("city", "job")}
    want = {"label": model.predict(few).astype(str), "probabilities": model.predict_proba(few)}
    write("pipeline_of_strings", made, feed, want)


def xgboost_regressor() -> None:
    """XGBoost's trees; they ask for features that are missing."""
    gaps = X.copy()
    gaps[::5, 0] = gaps[::3, 2] = np.nan
    model = xgboost.XGBRegressor(n_estimators=13, max_depth=3, random_state=0).fit(gaps, TARGET)
    made = convert_xgboost(model, initial_types=[("X", ToolsFloat([None, 6]))], target_opset=15)
    write("xgboost_regressor", made, {"X": gaps[:ROWS]}, {"variable": model.predict(gaps[:ROWS])})


def xgboost_classifier() -> None:
    """XGBoost's trees of three classes, each of which adds to one class."""
    model = xgboost.XGBClassifier(n_estimators=5, max_depth=3, random_state=0).fit(X, LEVEL)
    made = convert_xgboost(model, initial_types=[("X", ToolsFloat([None, 6]))], target_opset=15)
    want = {"label": model.predict(FEW), "probabilities": model.predict_proba(FEW)}
    write("xgboost_classifier", made, {"X": FEW}, want)


def lightgbm_classifier() -> None:
    """LightGBM's trees of two classes, with one score for both."""
    model = lightgbm.LGBMClassifier(n_estimators=12, max_depth=3, random_state=0, verbose=-1)
    model.fit(X, (LEVEL > 0).astype(int))
    types = [("X", ToolsFloat([None, 6]))]
    made = convert_lightgbm(model, initial_types=types, target_opset=15, zipmap=False)
    want = {"label": model.predict(FEW), "probabilities": model.predict_proba(FEW)}
    write("lightgbm_classifier", made, {"X": FEW}, want)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    forest_classifier()
    boosted_regressor()
    svm_classifier()
    svm_regressor()
    pipeline_of_strings()
    xgboost_regressor()
    xgboost_classifier()
    lightgbm_classifier()
