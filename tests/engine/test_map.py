"""The map at the top of the package names files that are there, and what is said of them is in them."""

import re
from pathlib import Path

import engine

ROOT = Path(engine.__file__).parent


def test_every_file_and_folder_of_the_map_is_there():
    named = re.findall(r"(?<![\w/])((?:\w+/)*\w+\.py|\w+/)(?!\w)", engine.__doc__)
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_what_the_map_says_is_called_is_defined_where_it_says():
    for file, name in (
        ("messages.py", "class Add"),
        ("types.py", "class StepPlan"),
        ("scheduling/scheduler.py", "def schedule("),
        ("scheduling/scheduler.py", "def update("),
        ("runner.py", "def execute("),
    ):
        assert name in (ROOT / file).read_text(), (file, name)


def test_every_package_says_where_to_begin_or_is_in_the_map():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert [name for name in sorted(packages) if f"{name}/" not in engine.__doc__] == []
