"""Every path and link that the handbook, and the docstrings, name is there: whoever follows one finds it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("backends", "bench", "cache", "edge", "engine", "gateway", "policies", "tests", "tiers")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
KNOWN = {path.relative_to(ROOT).as_posix() for package in (*PACKAGES, "docs") for path in (ROOT / package).rglob("*.*")}

# From one of the folders to a file with its ending, or to a folder with its slash.
_PATH = re.compile(rf"`((?:{'|'.join((*PACKAGES, 'deploy', 'docs'))})/(?:[\w./*-]*(?:/|\.[a-z0-9]+))?)`")
_FILE = re.compile(r"`([a-z][\w/]*\.(?:py|lua|md|tsv))`")
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(?:#[^)\s]*)?\)")
# Stands for a name of the reader's own.
_PLACEHOLDER = re.compile(r"[A-Z]{3,}|my-")


def missing(text: str) -> list[str]:
    """Paths in code spans that nothing in the project has; a file may be named without its folder."""
    paths = [path for path in _PATH.findall(text) if not _PLACEHOLDER.search(path)]
    files = [name for name in _FILE.findall(text) if not _PLACEHOLDER.search(name)]
    gone = [path for path in paths if not any(ROOT.glob(path))]
    return gone + [name for name in files if name not in KNOWN and not any(k.endswith(f"/{name}") for k in KNOWN)]


def docstrings(module: Path) -> str:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    places = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, places))


def test_paths_in_the_handbook() -> None:
    assert {page.name: gone for page in PAGES if (gone := missing(page.read_text(encoding="utf-8")))} == {}


def test_paths_in_docstrings() -> None:
    named = {str(module.relative_to(ROOT)): missing(docstrings(module)) for module in MODULES}
    assert {module: gone for module, gone in named.items() if gone} == {}


def test_links_of_the_handbook() -> None:
    links = [(page, link) for page in PAGES for link in _LINK.findall(page.read_text(encoding="utf-8"))]
    assert len(links) > 50
    assert [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []


def test_what_is_missing_is_found() -> None:
    text = "`cache/words/guards.py`, `cache/words/`, `engine/kernels/*.c`, `guards.py`, `bench/NAME.py`, `/v1/models`"
    assert missing(text) == []
    assert missing("`cache/verify.py`, `cache/none/`, `nowhere.py`") == [
        "cache/verify.py",
        "cache/none/",
        "cache/verify.py",
        "nowhere.py",
    ]
