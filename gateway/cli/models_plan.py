"""`tierline models plan`: will a model fit? The engine's `engine.planning` does the sums in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gateway.cli.common import Column, ConfigOption, Exit, JsonOption, print_json, print_table, settings_or_exit
from gateway.cli.engine_process import ask_engine
from gateway.models.store import ModelStore


def plan(
    model: Annotated[
        str, typer.Argument(help="A GGUF file, a model folder, a pulled or public model's name.", metavar="MODEL")
    ],
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", help="Memory of the GPU: 80GB, 24GiB.", metavar="SIZE")],
    context: Annotated[str, typer.Option("--context", help="Tokens of a request: 32k.", metavar="TOKENS")] = "4k",
    parallel: Annotated[int, typer.Option("--parallel", help="Requests at a time.", metavar="N")] = 1,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="Of keys and values: auto, or fp8 for half of that.", metavar="KIND")
    ] = "auto",
    tensor_parallel: Annotated[
        int, typer.Option("--tensor-parallel", help="GPUs that share each block.", metavar="N")
    ] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option("--pipeline-parallel", help="Stages that the blocks are divided into.", metavar="N")
    ] = 1,
    quantization: Annotated[
        str | None, typer.Option("--quantization", help="As if stored so: int4, fp8, mxfp4.", metavar="KIND")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a model takes on a GPU: weights, KV cache, activations, and how many requests fit.

    Nothing is loaded or downloaded. Public models are known by name, such as llama-3.1-8b, qwen3-32b, gpt-oss-20b.
    Exit code 1: with --precision auto, as an engine starts by itself, so many requests do not fit.

    Example: `tierline models plan llama-3.1-8b --gpu-memory 80GB --context 32k --parallel 64`.
    """
    arguments = [_path(model, config), "--gpu-memory", gpu_memory, "--context", context, "--parallel", str(parallel)]
    arguments += ["--kv-dtype", kv_dtype, "--tensor-parallel", str(tensor_parallel)]
    arguments += ["--pipeline-parallel", str(pipeline_parallel)]
    arguments += ["--quantization", quantization] if quantization else []
    ledger = ask_engine("engine.planning", arguments)
    if as_json:
        print_json(ledger)
    else:
        _print(ledger)
    if not ledger["precision"]["auto"]["fits"]:
        raise typer.Exit(Exit.FAILED)


def _path(model: str, config: Path | None) -> str:
    """A pulled model's file; anything else as it was given."""
    if Path(model).exists():
        return model
    local = {found.name: found for found in ModelStore(settings_or_exit(config).storage.data_dir).local()}
    return str(local[model].path) if model in local else model


def _print(ledger: dict[str, Any]) -> None:
    workload = ledger["workload"]
    context, parallel = workload["context"], workload["parallel"]
    print(f"{ledger['model']}: {ledger['parameters'] / 1e9:,.2f} billion parameters")
    stored = ledger["stored_bytes"].items()
    rows = [(f"weights as stored, {encoding}", _gigabytes(size)) for encoding, size in stored]
    rows += [
        ("KV cache of a token", f"{ledger['kv_bytes_per_token']:,} bytes"),
        (f"KV cache of {context:,} tokens", _gigabytes(ledger["kv_bytes_per_request"])),
    ]
    if ledger["kv_bytes_within_windows"] < ledger["kv_bytes_per_request"]:
        rows.append(("  of these within sliding windows", _gigabytes(ledger["kv_bytes_within_windows"])))
    print_table([Column(""), Column("", "number")], rows)
    print()
    rooms = [(f"--precision {name}", room) for name, room in ledger["precision"].items()]
    gpus, size = workload["tensor_parallel"] * workload["pipeline_parallel"], _gigabytes(workload["gpu_bytes"])
    where = f"on a GPU of {size}" if gpus == 1 else f"on the fullest of {gpus} GPUs of {size}"
    print_table(
        [Column(where), *(Column(title, "number") for title, _ in rooms)],
        [
            ("weights", *(_gigabytes(room["weights_bytes"]) for _, room in rooms)),
            ("activations of a step", *(_gigabytes(room["activation_bytes"]) for _, room in rooms)),
            ("left for the KV cache", *(_gigabytes(room["kv_budget_bytes"]) for _, room in rooms)),
            ("tokens in it", *(f"{room['kv_capacity_tokens']:,}" for _, room in rooms)),
            (f"requests of {context:,} tokens", *(f"{room['requests']:,}" for _, room in rooms)),
            (f"longest context of {parallel:,} requests", *(f"{room['longest_context']:,}" for _, room in rooms)),
            (
                f"{parallel:,} requests of {context:,} tokens",
                *("fit" if room["fits"] else "do not fit" for _, room in rooms),
            ),
        ],
    )
    print("\nauto keeps weights of four and eight bits packed, counted with the smallest groups that files have.")


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"
