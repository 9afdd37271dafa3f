"""The tree of the source files, a line each: a Python file's line is the first line of its docstring."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("protos", "shared", "engine_svc", "frontend_svc", "takt_client", "bench", "examples", "docs", "deploy")
SUFFIXES = {".py", ".proto", ".h", ".cpp", ".mjs", ".sh", ".engine", ".frontend"}
SKIPPED = {"__pycache__", "node_modules", "out"}


def source_files() -> Iterator[Path]:
    """Files that have a line, by directory; a directory's own files come before its subdirectories."""
    for room in ROOMS:
        yield from _under(ROOT / room)


def _under(folder: Path) -> Iterator[Path]:
    entries = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in entries:
        if path.is_file() and path.suffix in SUFFIXES and "_pb2" not in path.name and path.name != "__init__.py":
            yield path
    for path in entries:
        if path.is_dir() and path.name not in SKIPPED and not path.name.startswith("."):
            yield from _under(path)


def description(path: Path) -> str:
    """What a file is, in its own words."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        words = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].splitlines()
        return words[0] if words else ""
    comments = (line.lstrip("#/ ") for line in text.splitlines() if not line.startswith("#!"))
    return next(comment for comment in comments if comment)


def render() -> str:
    """The tree as Markdown: a list for each directory."""
    lines: list[str] = []
    directory = None
    for path in source_files():
        if path.parent != directory:
            directory = path.parent
            lines += ["", f"**{directory.relative_to(ROOT).as_posix()}/**", ""]
        lines.append(f"- `{path.name}`: {description(path)}")
    return "\n".join(lines).lstrip("\n") + "\n"
