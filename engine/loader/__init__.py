"""Loading models: file formats in, `ModelSpec` and tensors by role out.

Start reading at `source.py` (`open_model`, the one door), then `gguf.py` and `safetensors.py` (the formats), then
`families.py` (names and flags per architecture). Nothing here imports torch.
"""

from engine.loader.errors import ModelFileError
from engine.loader.info import GenerationDefaults, ModelInfo, TokenizerData
from engine.loader.source import OpenModel, open_model, read_info

__all__ = [
    "GenerationDefaults",
    "ModelFileError",
    "ModelInfo",
    "OpenModel",
    "TokenizerData",
    "open_model",
    "read_info",
]
