"""The import rules: who may know whom. They hold by the syntax tree, and in a process without torch or grpc."""

import subprocess
import sys

import pytest

from tests.contract.sources import PACKAGES, ROOT, files, imported_modules, imports_any, relative

SERVICES = ("engine_svc", "frontend_svc")
OURS = (*PACKAGES, "takt")
# Where a process begins: it puts the rooms together, and may name what it puts together.
GRPC_ROOMS = (
    "shared/rpc/",
    "engine_svc/service/",
    "frontend_svc/service/",
    "frontend_svc/routing/",
    "takt_client/",
)
TORCH_ROOMS = ("engine_svc/executor/", "engine_svc/kernels/", "engine_svc/model/")
PROTO_ROOMS = ("shared/rpc/", "engine_svc/service/", "frontend_svc/service/", "frontend_svc/routing/", "takt_client/")
CORE_MAY_IMPORT = (
    *("__future__", "abc", "bisect", "collections", "concurrent.futures", "contextlib", "dataclasses", "enum"),
    *("functools", "hashlib", "heapq", "itertools", "math", "operator", "struct", "types", "typing"),
    *("numpy", "engine_svc.core", "shared.types", "shared.errors"),
)


def in_rooms(path, rooms):
    return relative(path).startswith(rooms)


def offenders(paths, forbidden, *, allowed_rooms=()):
    found = {}
    for path in paths:
        names = imports_any(path, forbidden)
        if names and not in_rooms(path, allowed_rooms):
            found[relative(path)] = sorted(names)
    return found


def test_shared_imports_nothing_of_ours():
    assert not offenders(files("shared"), (*SERVICES, "takt_client"))
    assert not offenders(files("shared"), ("takt",), allowed_rooms=("shared/rpc/",))
    assert not offenders(files("shared"), ("grpc",), allowed_rooms=("shared/rpc/",))


def test_services_never_import_each_other():
    assert not offenders(files("engine_svc"), ("frontend_svc", "takt_client"))
    assert not offenders(files("frontend_svc"), ("engine_svc", "takt_client"))


def test_the_client_can_ship_alone():
    assert not offenders(files("takt_client"), ("shared", *SERVICES))


def test_protos_import_nothing_of_ours():
    generated = tuple((ROOT / "protos").rglob("*.py"))
    assert generated
    assert not offenders(generated, PACKAGES)


def test_nothing_imports_the_tests():
    assert not offenders(files(), ("tests",))


def test_torch_only_where_the_model_runs():
    assert not offenders(files(), ("torch", "transformers"), allowed_rooms=TORCH_ROOMS)


def test_grpc_only_at_the_edges():
    assert not offenders(files(), ("grpc",), allowed_rooms=GRPC_ROOMS)


def test_protobuf_types_stop_at_the_services():
    assert not offenders(files(), ("takt", "google.protobuf"), allowed_rooms=PROTO_ROOMS)


def test_messages_are_built_and_read_in_convert_modules_only():
    """A service's other modules may take a message as bytes or hand it on, and name its generated service."""
    for service in SERVICES:
        for path in files(service):
            messages = {
                name
                for name in imports_any(path, ("takt",))
                if name.endswith("_pb2") and not name.endswith("_pb2_grpc")
            }
            if messages and not path.name.startswith("convert"):
                assert "service" in path.parts or "routing" in path.parts, f"{relative(path)}: {messages}"


def test_the_core_knows_python_and_numpy_alone():
    for path in files("engine_svc/core"):
        for name in imported_modules(path):
            known = any(name == allowed or name.startswith(allowed + ".") for allowed in CORE_MAY_IMPORT)
            assert known, f"{relative(path)} imports {name}"


def test_text_knows_neither_the_network_nor_torch():
    forbidden = ("grpc", "torch", "transformers", "takt", "frontend_svc.service", "frontend_svc.routing")
    assert not offenders(files("frontend_svc/text"), forbidden)


def test_the_executor_knows_nothing_of_the_scheduler():
    forbidden = ("grpc", "takt", "engine_svc.core.scheduler", "engine_svc.core.kv_cache_manager", "engine_svc.service")
    for path in files("engine_svc/executor", "engine_svc/model"):
        names = {name for name in imports_any(path, forbidden) if not name.startswith("engine_svc.core.scheduler_")}
        assert not names, f"{relative(path)}: {names}"


def test_starting_a_process_imports_no_torch_before_its_flags_are_parsed():
    for path in files():
        if path.name == "__main__.py":
            names = imported_modules(path, at_import_time=True)
            assert not {name for name in names if name.split(".")[0] in ("torch", "transformers")}, relative(path)


def modules(*packages):
    names = [relative(path)[: -len(".py")].replace("/", ".").removesuffix(".__init__") for path in files(*packages)]
    return [name for name in names if not name.endswith("__main__")]


def import_without(blocked, names):
    """Imports modules in a process where some packages cannot be imported; the transitive case of the rules."""
    code = "\n".join(
        [
            "import importlib, sys",
            *(f"sys.modules[{package!r}] = None" for package in blocked),
            *(f"importlib.import_module({name!r})" for name in names),
        ]
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


HEAVY = ("torch", "transformers")


@pytest.mark.parametrize(
    ("packages", "blocked"),
    [
        (("engine_svc/core",), (*HEAVY, "grpc", "google.protobuf", "takt", "asyncio", "frontend_svc")),
        (("frontend_svc",), (*HEAVY, "engine_svc", "takt_client")),
        (("frontend_svc/text",), (*HEAVY, "grpc", "engine_svc")),
        (("shared",), (*HEAVY, *SERVICES, "takt_client")),
        (("takt_client",), (*HEAVY, *SERVICES, "shared", "numpy")),
        (("engine_svc/service",), (*HEAVY, "frontend_svc", "takt_client")),
    ],
    ids=lambda value: value[0].replace("/", ".") if len(value) == 1 else "",
)
def test_rooms_import_without_what_they_must_not_know(packages, blocked):
    result = import_without(blocked, modules(*packages))
    assert result.returncode == 0, result.stderr[-2_000:]


def test_the_fake_executor_needs_no_torch():
    result = import_without((*HEAVY, "grpc"), ["engine_svc.executor.fake"])
    assert result.returncode == 0, result.stderr[-2_000:]


@pytest.mark.parametrize("module", ["engine_svc", "frontend_svc"])
def test_help_is_shown_without_torch(module):
    code = "\n".join(
        [
            "import runpy, sys",
            *(f"sys.modules[{package!r}] = None" for package in HEAVY),
            f"sys.argv = [{module!r}, '--help']",
            f"runpy.run_module({module!r}, run_name='__main__')",
        ]
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-2_000:]
    assert "--port" in result.stdout
