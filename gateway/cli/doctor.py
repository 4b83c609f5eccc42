"""`tierline doctor`: the findings of `gateway.doctor` as a table or JSON."""

from __future__ import annotations

import dataclasses

import typer

from gateway.cli.common import Column, ConfigOption, Exit, JsonOption, config_path, print_json, print_table
from gateway.doctor import examine

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check Python, packages, ports, disk, memory, models, database, GPU and compiler against tierline.yaml.

    Changes nothing. Exit code 0: `tierline up` should work, perhaps with warnings; 1: it would not.
    """
    findings = examine(config_path(config))
    failed = sum(finding.status == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        from rich.text import Text

        columns = [Column("check"), Column("status", "value"), Column("found"), Column("what to do")]
        print_table(
            columns,
            [(f.check, Text(f.status, style=_COLOURS[f.status]), f.message, f.advice) for f in findings],
        )
        warned = sum(finding.status == "warn" for finding in findings)
        print(f"\n{failed} to correct, {warned} to know, {len(findings) - failed - warned} in order")
    raise typer.Exit(Exit.FAILED if failed else Exit.OK)
