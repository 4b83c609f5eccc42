"""`python -m engine.planning MODEL --gpu-memory 80GB`: the ledger as JSON. Exit code 2: no plan for such words."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence

from engine.config import KV_DTYPES
from engine.loader.errors import ModelFileError
from engine.parallel.errors import LayoutError
from engine.planning.ledger import Workload, make_ledger
from engine.planning.source import QUANTIZATIONS, find_source

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_LENGTHS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def parse_bytes(text: str) -> int:
    """`80GB` (10^9 bytes), `80GiB` (2^30), or bytes. Raises ValueError."""
    return _parse(text, _UNITS, "a size of memory: write 80GB, 24GiB or a number of bytes")


def parse_tokens(text: str) -> int:
    """`32k` (1,024 tokens each), or a number of tokens. Raises ValueError."""
    return _parse(text, _LENGTHS, "a length: write 32k or a number of tokens")


def _parse(text: str, units: dict[str, int], what: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in units:
        raise ValueError(f"{text!r} is not {what}")
    return math.floor(float(found[1]) * units[found[2].upper()])


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="tierline models plan", description=__doc__)
    parser.add_argument("model", help="a GGUF file, a model folder, a config.json, or a public model's name")
    parser.add_argument("--gpu-memory", required=True, help="such as 80GB")
    parser.add_argument("--context", default="4k", help="tokens of a request, such as 32k")
    parser.add_argument("--parallel", type=int, default=1, help="requests at a time")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="as if the matrices were stored so")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="auto", help="of keys and values")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each block")
    parser.add_argument("--pipeline-parallel", type=int, default=1, help="stages that the blocks are divided into")
    given = parser.parse_args(arguments)
    try:
        source = find_source(given.model, given.quantization)
        workload = Workload(
            gpu_bytes=parse_bytes(given.gpu_memory),
            context=parse_tokens(given.context),
            parallel=given.parallel,
            max_num_batched_tokens=given.max_num_batched_tokens,
            kv_fp8=given.kv_dtype == "fp8",
            tensor_parallel=given.tensor_parallel,
            pipeline_parallel=given.pipeline_parallel,
        )
        ledger = make_ledger(source, workload)
    except (ModelFileError, LayoutError, ValueError) as error:
        print(f"tierline: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps({"model": source.name} | ledger.as_dict()))


if __name__ == "__main__":
    main(sys.argv[1:])
