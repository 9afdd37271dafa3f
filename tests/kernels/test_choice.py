"""Which op set a model gets, and that a machine without a compiler only loses speed."""

import logging
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from engine_svc.kernels import build  # noqa: E402 - after importorskip
from engine_svc.kernels.build import (  # noqa: E402
    INSTRUCTION_SETS,
    BuildError,
    cpu_flags,
    usable_instruction_sets,
)
from engine_svc.kernels.choose import load_kernels  # noqa: E402
from engine_svc.model import hardware  # noqa: E402
from engine_svc.model.load import LoadOptions, load_model  # noqa: E402
from shared.errors import StartupError  # noqa: E402
from tests.support.tiny_models import tiny_checkpoint  # noqa: E402

pytestmark = pytest.mark.model

PORTABLE = INSTRUCTION_SETS[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAKT_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small source in place of the kernels."""
    sources = tmp_path_factory.mktemp("csrc")
    (sources / "kernels.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    return sources


def load(folder: Path, **options):
    return load_model(LoadOptions(model=str(folder), device="cpu", **options))


def test_native_ops_are_the_default(folder: Path) -> None:
    numerics = load(folder).info.numerics
    assert (numerics.op_set, numerics.batch_invariant) == ("native-cpu", True)
    assert numerics.instruction_set == usable_instruction_sets()[0].name


def test_auto_dtype_is_bfloat16_with_native_ops_on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cpu_has_bfloat16", lambda: False)
    cpu = torch.device("cpu")
    assert hardware.choose_dtype("auto", "bfloat16", cpu, widens_bfloat16=True) is torch.bfloat16
    assert hardware.choose_dtype("auto", "bfloat16", cpu) is torch.float32


@pytest.mark.parametrize("cause", ["no compiler", "bad source", "no space"])
def test_reference_ops_where_kernels_cannot_be_built(cause, folder, cache, quick, monkeypatch, caplog) -> None:
    if cause == "no compiler":
        monkeypatch.setattr(build, "COMPILERS", ("no-such-compiler",))
    elif cause == "bad source":
        (quick / "kernels.cpp").write_text("no C++\n")
    else:
        cache.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        numerics = load(folder).info.numerics
    assert numerics.op_set == "reference"
    [record] = [record for record in caplog.records if "reference ops" in record.getMessage()]
    assert "\n" not in record.getMessage()
    with pytest.raises(StartupError, match="--ops native cannot be had: "):
        load(folder, ops="native")


def test_float16_has_no_kernels(folder, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        assert load(folder, dtype="float16").info.numerics.op_set == "reference"
    assert "not float16" in caplog.text
    with pytest.raises(StartupError, match="--ops native cannot be had: they know float32 and bfloat16"):
        load(folder, dtype="float16", ops="native")


def test_a_library_is_built_once(cache, quick) -> None:
    path = build.built_library(cache, PORTABLE)
    made = path.stat().st_mtime_ns
    assert build.built_library(cache, PORTABLE) == path
    assert path.stat().st_mtime_ns == made
    assert [entry.name for entry in cache.iterdir()] == [path.name], "something was left behind"
    (quick / "kernels.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert not build.is_built(cache, PORTABLE)


def test_another_library_is_refused(cache, quick) -> None:
    with pytest.raises(BuildError, match="cannot be loaded"):
        load_kernels(cache, PORTABLE)


def test_the_processor_decides(tmp_path: Path) -> None:
    def names(flags: str) -> list[str]:
        path = tmp_path / "cpuinfo"
        path.write_text(f"processor : 0\nflags\t\t: fpu {flags}\n")
        return [version.name for version in usable_instruction_sets(cpu_flags(path))]

    avx512 = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq"
    assert names(f"{avx512} avx512_bf16") == ["avx512_bf16", "avx512", "avx2", "portable"]
    assert names(avx512)[0] == "avx512"
    assert names("avx2 fma f16c") == ["avx2", "portable"]
    assert names("sse2") == ["portable"]
    assert cpu_flags(tmp_path / "absent") == frozenset()
