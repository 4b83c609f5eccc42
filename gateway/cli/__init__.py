"""The command `tierline`: one module per group of commands, assembled in `main.py`.

It promises that every command has useful help, `--json` where it prints data, and exit codes that mean something
(`common.py`). Start reading at `main.py`.
"""

from gateway.cli.main import main

__all__ = ["main"]
