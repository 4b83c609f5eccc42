"""Loading models: file formats in, `ModelSpec` and tensors by role out.

Start reading at `gguf.py` (the format), then `families.py` (names and flags per architecture), then `info.py`
(`read_info`, what the HTTP side needs). Nothing here imports torch.
"""

from engine.loader.errors import ModelFileError
from engine.loader.info import ModelInfo, TokenizerData, read_info

__all__ = ["ModelFileError", "ModelInfo", "TokenizerData", "read_info"]
