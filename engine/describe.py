"""`python -m engine.describe MODEL…`: what models say of themselves, as JSON, one object a line.

For those who must not import the engine. Imports no torch and reads no weights. A model that cannot be described has
`error` in place of the rest.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from engine.loader import ModelFileError, ModelInfo, read_info
from engine.text.tokenizer import end_ids


def describe(info: ModelInfo) -> dict[str, Any]:
    """The description as JSON takes it. Sizes in bytes, `context` in tokens."""
    spec = info.spec
    recommended = dataclasses.asdict(info.generation)
    return {
        "path": str(info.path),
        "name": info.name,
        "format": info.format,
        "family": spec.architecture,
        "parameters": spec.num_parameters,
        "quantization": info.quantization,
        "weights_bytes": info.file_bytes,
        "context": spec.max_position,
        "vocabulary": spec.vocab_size,
        "licence": info.licence,
        "has_chat_template": info.chat_template is not None,
        "end_tokens": [info.tokenizer.tokens[i] for i in sorted(end_ids(info.tokenizer))],
        "recommended_sampling": {name: value for name, value in recommended.items() if value is not None},
    }


def main(paths: list[str]) -> int:
    """Print a line for each path; 1 if one of them could not be described."""
    failed = False
    for path in paths:
        try:
            line = describe(read_info(path))
        except ModelFileError as error:
            failed = True
            line = {"path": path, "error": str(error)}
        print(json.dumps(line))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
