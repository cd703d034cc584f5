"""Training of published systems: one typed configuration and one ``train`` each."""

from __future__ import annotations

from tilefold._internal.lazy import lazy_exports

_NAMES = {
    "catalogue": "RECIPES get_recipe train",
    "colbert": "ColbertRecipe",
    "encoders": (
        "EncoderSpec MlmSpec ClsMlmSpec EpicSpec MlpSpec BinarySpec IdfSpec CausalSpec "
        "BidirectionalSpec EchoSpec ProsperSpec BgeM3Spec SplateSpec SparseEncoderSpec "
        "build_encoder"
    ),
    "onnx_export": "ExportedGraph export_onnx",
    "_run": "Losses OutOfTimeError TrainingError",
    "lsr": "LsrRecipe RegularizerSpec TrainResult",
    "_settings": "TrainingSettings",
    "backbone": "minilm_splade minilm_path load_dense_minilm",
}
__all__, __getattr__, __dir__ = lazy_exports(globals(), _NAMES)
