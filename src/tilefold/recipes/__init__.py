"""Training of published systems: one typed configuration and one ``train`` each."""

from __future__ import annotations

from tilefold._lazy import lazy_exports

_HOME = {
    "RECIPES": "catalogue",
    "ColbertRecipe": "colbert",
    "EncoderSpec": "encoders",
    "ExportedGraph": "onnx_export",
    "build_encoder": "encoders",
    "export_onnx": "onnx_export",
    "Losses": "_run",
    "OutOfTimeError": "_run",
    "LsrRecipe": "lsr",
    "RegularizerSpec": "lsr",
    "SparseRecipe": "lsr",
    "SpladeRecipe": "splade",
    "TrainResult": "splade",
    "TrainingError": "_run",
    "TrainingSettings": "_settings",
    "get_recipe": "catalogue",
    "train": "catalogue",
    "minilm_splade": "backbone",
    "minilm_path": "backbone",
    "load_dense_minilm": "backbone",
}

__all__ = list(_HOME)
__getattr__, __dir__ = lazy_exports(globals(), _HOME)
