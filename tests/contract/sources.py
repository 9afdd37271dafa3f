"""The repository's own Python files and their syntax trees, read once."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "engine_svc", "frontend_svc", "takt_client")


def is_generated(path: Path) -> bool:
    return "_pb2" in path.name


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def files(*packages: str) -> tuple[Path, ...]:
    """Python files of packages, generated ones left out; all of ours when none is named."""
    found = (path for package in packages or PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    return tuple(path for path in found if "__pycache__" not in path.parts and not is_generated(path))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(path: Path, *, at_import_time: bool = False) -> set[str]:
    """Full names of what a file imports; `at_import_time` leaves out imports inside functions."""
    names: set[str] = set()
    todo: list[ast.AST] = [tree_of(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)} imports relatively"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        todo += ast.iter_child_nodes(node)
    return names


def imports_any(path: Path, prefixes: tuple[str, ...]) -> set[str]:
    """Imported names that are one of the prefixes or lie under it."""
    return {
        name
        for name in imported_modules(path)
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
    }
