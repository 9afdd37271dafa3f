"""Size limits, and things that must not be in the code."""

import ast
import re

from tests.contract.sources import ROOT, files, imports_any, relative, tree_of

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 6
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def functions(path):
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, FUNCTIONS)]


def is_command(function):
    """A command of a command line: each of its parameters is a flag."""
    return any(
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and decorator.func.attr == "command"
        for decorator in function.decorator_list
    )


def test_files_are_at_most_500_lines():
    for path in (*files(), *files("tests"), *files("bench")):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_FILE_LINES, relative(path)


def test_functions_are_at_most_80_lines():
    for path in files():
        for function in functions(path):
            length = function.end_lineno - function.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}: {function.name} has {length} lines"


def test_functions_have_at_most_6_parameters():
    for path in files():
        for function in functions(path):
            arguments = function.args
            names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > MAX_PARAMETERS and not is_command(function):
                # A declaration's keywords are its reader's words, as in option(...) of the configuration.
                assert relative(path) == "shared/config.py", f"{relative(path)}: {function.name} has {count}"


def test_package_files_are_empty():
    for path in files():
        if path.name == "__init__.py":
            assert path.read_text() == "", relative(path)


def test_modules_tell_what_they_do():
    for path in files():
        if path.name != "__init__.py":
            assert ast.get_docstring(tree_of(path)), relative(path)


def test_the_environment_is_read_in_one_place():
    for path in files():
        if relative(path) == "shared/config.py":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                written = relative(path) in ENVIRONMENT_WRITERS
                assert written or node.attr not in ("environ", "getenv"), relative(path)


# Set variables that a library reads while it is imported; they read none.
ENVIRONMENT_WRITERS: set[str] = set()

# Loading any of these runs what the bytes say.
UNSAFE_MODULES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle")
UNSAFE_CALLS = {"eval", "exec", "__import__"}
UNSAFE_METHODS = {("torch", "load"), ("yaml", "load"), ("numpy", "load"), ("np", "load"), ("os", "system")}


def test_nothing_runs_what_it_reads():
    for path in files():
        assert not imports_any(path, UNSAFE_MODULES), relative(path)
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            if isinstance(function, ast.Name):
                assert function.id not in UNSAFE_CALLS, f"{relative(path)}:{node.lineno}"
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                assert (function.value.id, function.attr) not in UNSAFE_METHODS, f"{relative(path)}:{node.lineno}"
            for keyword in node.keywords:
                if keyword.arg in ("trust_remote_code", "shell"):
                    is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                    assert is_off, f"{relative(path)}:{node.lineno}"


def test_paths_of_one_machine_are_nowhere():
    home = re.compile(r"(?<![\w.])/(?:home|root|work)/\w")
    for path in (*files(), *files("tests"), *files("bench")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            assert not home.search(line) or relative(path) == "tests/contract/test_code.py", f"{path}:{number}"
    for name in ("README.md", "Makefile", "docker-compose.yml"):
        path = ROOT / name
        assert not path.exists() or not home.search(path.read_text(encoding="utf-8")), name
