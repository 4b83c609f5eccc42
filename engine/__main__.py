"""`python -m engine`: serve one model over HTTP. `tierline engine` runs this.

The HTTP process imports no torch; it starts the core process, which does, and ends with it. Exit codes: 0 stopped on
request, 1 the model could not be served, 2 wrong arguments.

The core takes longest to be ready. So it is started as soon as the arguments are known to make sense, and what the
HTTP side needs besides is imported and read while it loads.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine.argument_types import integer, number
from engine.config import KV_DTYPES, PRECISIONS, ROLES, SPECULATIVE, TASKS, EngineConfig
from engine.flags import with_flags
from engine.kv.page_seed import page_seed
from engine.lifeline import watch_lifeline
from engine.limits import SchedulerConfig
from engine.parallel.errors import LayoutError
from engine.parallel.layout import MOST_RANKS
from engine.parallel.settings import check_settings
from engine.serve import CannotServe, serve
from engine.server.parsers import REASONING_PARSERS, TOOL_PARSERS
from engine.transfer import address as redis_address
from engine.transfer.role import check_role

if TYPE_CHECKING:
    from engine.server.model import Model


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line; argparse exits with 2 and a message if it is wrong."""
    defaults = EngineConfig(model_path="", served_name="")
    parser = argparse.ArgumentParser(
        prog="tierline engine", description="Serve one model: OpenAI-compatible HTTP, /metrics, /health."
    )
    add = parser.add_argument
    add("--model", required=True, help="a GGUF file, a Hugging Face folder, or the name of a pulled model")
    add("--served-name", help="the model's name in requests (default: the name given to --model)")
    add("--data-dir", type=Path, default=Path("var"), help="where pulled models lie (default: var)")
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=integer(0, 65535), default=8101, help="port; 0 takes a free one (default: 8101)")
    add("--threads", type=integer(1), help="compute threads (default: by cores and CPU quota)")
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    add("--precision", choices=PRECISIONS, default="auto", help="float32 is exact; auto is fastest (default: auto)")
    add("--no-graphs", action="store_true", help="on a GPU, start steps kernel by kernel, not as recorded ones")
    add("--deterministic", action="store_true", help="on a GPU, attention that does not depend on what runs beside it")
    add(
        "--tensor-parallel",
        type=integer(1, MOST_RANKS),
        default=defaults.tensor_parallel,
        help="processes that share each block of the model, each with a GPU of its own (%(default)s)",
    )
    add(
        "--pipeline-parallel",
        type=integer(1, MOST_RANKS),
        default=defaults.pipeline_parallel,
        help="stages that the blocks are divided into, for models that do not fit otherwise (%(default)s)",
    )
    add("--max-model-len", type=integer(2), help="longest context in tokens (default: the model's)")
    add("--max-num-seqs", type=integer(1), default=defaults.max_num_seqs, help="requests per step (%(default)s)")
    add(
        "--max-num-batched-tokens",
        type=integer(1),
        default=defaults.max_num_batched_tokens,
        help="tokens per step; longer prompts are computed in chunks (%(default)s)",
    )
    add(
        "--max-waiting",
        type=integer(0),
        default=defaults.max_waiting,
        help="requests that may wait before the next one is told to come back later, status 429 (%(default)s)",
    )
    add(
        "--target-tpot-ms",
        type=number(0.1, 60_000),
        help="keep steps so short that an answer gets its next token within this time (default: as fast as all go)",
    )
    add("--kv-cache-bytes", type=integer(1), help="memory for the KV cache (default: by the memory that is free)")
    add("--block-size", type=integer(1), help="tokens per page of the KV cache (default: the runner's)")
    add("--kv-dtype", choices=KV_DTYPES, default="auto", help="fp8, on a GPU: twice as many tokens (default: auto)")
    add("--no-prefix-cache", action="store_true", help="compute every prompt from its first token")
    add("--kv-host-bytes", type=integer(1), help="second pool, for pages that are evicted and were found often")
    add("--kv-host-dir", type=Path, help="folder of that pool's file, on a fast disk (with a GPU, by default: memory)")
    add("--kv-redis-url", help=f"share pages with other engines by this Redis (default: ${redis_address.VARIABLE})")
    add(
        "--kv-redis-bytes",
        type=integer(1),
        default=defaults.kv_redis_bytes,
        help="of this model's pages there; the least recently used go first (%(default)s)",
    )
    add(
        "--kv-redis-ttl-seconds",
        type=integer(1),
        default=defaults.kv_redis_ttl_seconds,
        help="how long a page that nobody uses stays there (%(default)s)",
    )
    add(
        "--role",
        choices=ROLES,
        default=defaults.role,
        help="prefill: compute prompts for other engines; decode: have long ones computed by others (%(default)s)",
    )
    add("--kv-listen", help="offer pages to other engines: tcp://HOST:PORT, or shm:///PATH on the same host")
    add("--kv-address", help="how others reach what --kv-listen names (default: the same)")
    add(
        "--kv-outbox-bytes",
        type=integer(1),
        default=defaults.kv_outbox_bytes,
        help="memory for pages that are offered; the least recently used go first (%(default)s)",
    )
    add("--kv-peer", action="append", default=[], metavar="ADDRESS", help="fetch pages from there; repeatable")
    add(
        "--speculative",
        choices=SPECULATIVE,
        default=defaults.speculative,
        help="propose tokens and check several in one step: by look-up in the text, by a draft model, or by a head "
        "that reads the model's states (%(default)s)",
    )
    add(
        "--num-speculative-tokens",
        type=integer(1, 32),
        default=defaults.num_speculative_tokens,
        help="proposed per request and step, at most; fewer where they do not pay (%(default)s)",
    )
    add(
        "--draft-model",
        help="for '--speculative draft' a small model of the same vocabulary, path or pulled name; for 'eagle3' the "
        "folder of the head",
    )
    add("--task", choices=TASKS, default="auto", help="what to do with texts (default: what the model is made for)")
    add(
        "--max-batch-size",
        type=integer(1),
        default=defaults.max_batch_size,
        help="texts to embed or score that are worth no further wait for others (%(default)s)",
    )
    add(
        "--max-wait-ms",
        type=number(0, 10_000),
        default=defaults.max_wait_ms,
        help="how long such a text may wait for others (%(default)s)",
    )
    add("--lora", action="append", default=[], metavar="NAME=DIR", help="serve the adapter in DIR as NAME; repeatable")
    add("--lora-dir", type=Path, help="folder below which lie adapters that may be loaded while the engine runs")
    add("--max-loras", type=integer(1), default=4, help="adapters at a time; memory is kept for them (%(default)s)")
    add("--max-lora-rank", type=integer(1), default=16, help="largest rank of an adapter (%(default)s)")
    add("--reload-dir", type=Path, help="folder below which lie weights that may take over while the engine runs")
    add("--overlap", action="store_true", help="begin each step while the device works on the one before it")
    add("--trace", type=Path, help="write where the time of each step goes to this file, for chrome://tracing")
    add("--temperature", type=number(0, 2), help="where a request names none (default: as the model recommends, or 1)")
    add("--top-p", type=number(0, 1), help="where a request names none (default: as the model recommends, or 1)")
    add("--no-recommended-sampling", action="store_true", help="leave aside what the model's authors recommend")
    add("--tool-parser", choices=TOOL_PARSERS, default="auto", help="form of tool calls (default: by the template)")
    add(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="auto",
        help="form of thoughts, which are told apart from the answer (default: by the template)",
    )
    add("--watchdog-seconds", type=float, default=120.0, help="restart a core whose loop hangs so long (%(default)s)")
    return parser.parse_args(arguments)


def find_model(model: str, data_dir: Path) -> Path:
    """What `--model` means: the file or folder itself if it is a path, else the one GGUF file of the pulled model.

    Raises:
        FileNotFoundError: nothing is there, or more than one file.
    """
    path = Path(model)
    if path.is_file() or (path / "config.json").is_file():
        return path
    if path.is_dir() and (len(path.parts) > 1 or not (data_dir / "models" / model).is_dir()):
        raise FileNotFoundError(f"{model}: a folder without config.json, so no model, or an incomplete one")
    if path.suffix == ".gguf" or len(path.parts) > 1:
        raise FileNotFoundError(f"{model}: no such file or folder")
    folder = data_dir / "models" / model
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"no model '{model}' in {folder}; run 'tierline models pull {model}'")
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise FileNotFoundError(f"{folder} holds several models ({names}); give the path of one")
    return files[0]


def _name_of(model: str) -> str:
    path = Path(model)
    return path.stem if path.is_file() else path.resolve().name if path.is_dir() else model


def _find_draft_model(options: argparse.Namespace) -> Path | None:
    """What `--draft-model` means. Raises FileNotFoundError as `find_model`, ValueError for options that do not fit."""
    if (options.draft_model is not None) != (options.speculative in ("draft", "eagle3")):
        raise ValueError("'--speculative draft' or 'eagle3' and '--draft-model' need each other")
    return None if options.draft_model is None else find_model(options.draft_model, options.data_dir)


def _find_adapters(options: argparse.Namespace, name: str) -> dict[str, str]:
    """The folders of `--lora` by name. Raises ValueError and CannotServe for what cannot be served."""
    if len(options.lora) > options.max_loras:
        raise ValueError(f"'--lora' names {len(options.lora)} adapters, '--max-loras' allows {options.max_loras}")
    if options.lora_dir is not None and not options.lora_dir.is_dir():
        raise ValueError(f"'--lora-dir' {options.lora_dir}: no such folder")
    return _adapter_folders(options.lora, name) if options.lora else {}


def _adapter_folders(given: Sequence[str], model_name: str) -> dict[str, str]:
    """The folders of adapters by name, from NAME=DIR. Raises ValueError and CannotServe as `_find_adapters`."""
    from engine.adapters.peft import find_folder
    from engine.loader import ModelFileError
    from engine.server.adapters import check_adapter_name

    folders: dict[str, str] = {}
    for adapter in given:
        name, equals, path = adapter.partition("=")
        if not equals or name in folders:
            raise ValueError(f"'--lora {adapter}': give NAME=DIR, each name once")
        check_adapter_name(name, model_name)
        try:
            folders[name] = str(find_folder(path, None))
        except ModelFileError as error:
            raise CannotServe(str(error)) from error
    return folders


def _check_tiers(options: argparse.Namespace) -> None:
    """Where pages go beyond the KV cache. Raises ValueError for options that do not fit together."""
    if options.kv_redis_url is not None:
        os.environ[redis_address.VARIABLE] = options.kv_redis_url  # for the core
    if options.kv_host_dir is not None and options.kv_host_bytes is None:
        raise ValueError("'--kv-host-dir' needs '--kv-host-bytes': how large the file may become")
    check_role(options.role, options.kv_listen, options.kv_address, options.kv_peer)
    elsewhere = redis_address.redis_url() or options.kv_host_bytes or options.kv_listen or options.kv_peer
    if elsewhere and options.no_prefix_cache:
        raise ValueError("pages elsewhere are the prefix cache's, which '--no-prefix-cache' forbids")


def _load(options: argparse.Namespace, path: Path, name: str) -> Model:
    """The model as the HTTP side knows it. Raises CannotServe where it does not fit the options."""
    from engine.loader import GenerationDefaults, ModelFileError
    from engine.server.model import Model
    from engine.text.chat_template import ChatTemplateError

    said = GenerationDefaults(options.temperature, options.top_p)
    parsers = {"tool_parser": options.tool_parser, "reasoning_parser": options.reasoning_parser}
    recommended = not options.no_recommended_sampling
    try:
        model = Model.load(path, name, said, recommended=recommended, **parsers, task=options.task)
    except (ModelFileError, ChatTemplateError, ValueError) as error:
        raise CannotServe(str(error)) from error
    if model.pooling is not None:
        if options.role != "both":
            raise CannotServe("'--role' is for models that generate text, and this one does not")
        if options.speculative != "off":
            raise CannotServe("'--speculative' is for models that generate text, and this one does not")
        if options.lora or options.lora_dir is not None:
            raise CannotServe("adapters are for models that generate text, and this one does not")
    return model


def main(arguments: list[str]) -> int:
    """Parse, check everything that can be checked without reading the model, then serve."""
    options = parse_arguments(arguments)
    watch_lifeline()
    # How many texts are tokenized at once is up to `lanes.py`; the library would take every core for each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        path = find_model(options.model, options.data_dir)
        name = options.served_name or _name_of(options.model)
        SchedulerConfig(options.max_num_seqs, options.max_num_batched_tokens, options.max_waiting)
        page_seed()  # the core reads it, too
        _check_tiers(options)
        draft = _find_draft_model(options)
        if options.reload_dir is not None and not options.reload_dir.is_dir():
            raise ValueError(f"'--reload-dir' {options.reload_dir}: no such folder")
        if options.trace is not None and not os.access(options.trace.resolve().parent, os.W_OK):
            raise ValueError(f"'--trace' {options.trace}: its folder cannot be written to")
        adapters = _find_adapters(options, name)
        listener = _listen(options.host, options.port)
    except (CannotServe, FileNotFoundError, ValueError) as error:
        print(f"error: {with_flags(str(error))}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot listen on {options.host} port {options.port}: {error.strerror}", file=sys.stderr)
        return 1
    config = EngineConfig(
        model_path=str(path),
        served_name=name,
        precision=options.precision,
        device=options.device,
        threads=options.threads,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_waiting=options.max_waiting,
        kv_cache_bytes=options.kv_cache_bytes,
        block_size=options.block_size,
        prefix_cache=not options.no_prefix_cache,
        kv_host_bytes=options.kv_host_bytes,
        kv_host_dir=None if options.kv_host_dir is None else str(options.kv_host_dir.resolve()),
        kv_redis_bytes=options.kv_redis_bytes,
        kv_redis_ttl_seconds=options.kv_redis_ttl_seconds,
        role=options.role,
        kv_listen=options.kv_listen,
        kv_address=options.kv_address,
        kv_outbox_bytes=options.kv_outbox_bytes,
        kv_peers=tuple(options.kv_peer),
        target_tpot_ms=options.target_tpot_ms,
        tensor_parallel=options.tensor_parallel,
        pipeline_parallel=options.pipeline_parallel,
        graphs=not options.no_graphs,
        deterministic=options.deterministic,
        kv_dtype=options.kv_dtype,
        overlap=options.overlap,
        trace_path=None if options.trace is None else str(options.trace.resolve()),
        speculative=options.speculative,
        num_speculative_tokens=options.num_speculative_tokens,
        draft_model_path=None if draft is None else str(draft),
        max_loras=options.max_loras if adapters or options.lora_dir is not None else 0,
        max_lora_rank=options.max_lora_rank,
        lora_dir=None if options.lora_dir is None else str(options.lora_dir.resolve()),
        task=options.task,
        max_batch_size=options.max_batch_size,
        max_wait_ms=options.max_wait_ms,
        reload_dir=None if options.reload_dir is None else str(options.reload_dir.resolve()),
    )
    if config.tensor_parallel * config.pipeline_parallel > 1:
        from engine.loader import ModelFileError, open_model

        try:
            check_settings(config, open_model(path).spec, adapters=bool(adapters))
        except (LayoutError, ModelFileError) as error:
            listener.close()
            print(f"error: {with_flags(str(error))}", file=sys.stderr)
            return 1
    import uvloop

    return uvloop.run(serve(partial(_load, options, path, name), config, adapters, listener, options.watchdog_seconds))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
