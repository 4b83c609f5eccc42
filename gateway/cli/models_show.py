"""`tierline models show`: what a model is, before it is served."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gateway.cli.common import Column, ConfigOption, JsonOption, fail, print_json, print_table, settings_or_exit
from gateway.models.description import describe
from gateway.models.errors import ModelError
from gateway.models.store import ModelStore


def show(
    model: Annotated[
        str, typer.Argument(help="A pulled model's name, a GGUF file, or a Hugging Face folder.", metavar="MODEL")
    ],
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", help="Where models/ lies. Default: storage.data_dir of tierline.yaml.", metavar="FOLDER"
        ),
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a model is: family, size, quantisation, context, licence, and the sampling that its authors recommend.

    Nothing is loaded. A file or folder that is damaged or incomplete is refused, with the name of what is missing.

    Examples: `tierline models show smollm2-135m`, `tierline models show ./Qwen3-8B-AWQ`.
    """
    store = ModelStore(data_dir or settings_or_exit(config).storage.data_dir)
    try:
        path = store.find(model)
        found = describe([path])[path]
    except ModelError as error:
        fail(str(error))
    if isinstance(found, str):
        fail(found)
    local = store.get(model)
    licence = (local.licence if local else None) or found.licence
    if as_json:
        print_json(msgspec.to_builtins(found) | {"licence": licence})
        return
    recommended = ", ".join(f"{name} {value:g}" for name, value in found.recommended_sampling.items())
    rows = [
        ("model", found.name),
        ("lies in", str(found.path)),
        ("format", found.format),
        ("family", found.family),
        ("parameters", f"{found.parameters:,}"),
        ("weights", f"{found.weights_bytes:,} bytes, most of them {found.quantization}"),
        ("context", f"{found.context:,} tokens"),
        ("vocabulary", f"{found.vocabulary:,} tokens"),
        ("licence", licence or "not said"),
        ("chat template", "yes" if found.has_chat_template else "none: not tuned for conversations"),
        ("ends an answer", ", ".join(found.end_tokens) or "no token"),
        ("recommended", recommended or "no sampling"),
    ]
    print_table([Column("", "value"), Column("")], rows)
