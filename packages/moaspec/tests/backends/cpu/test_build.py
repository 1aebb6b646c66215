"""Kernels are compiled once; without them everything works, and somebody is told why."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import moaspec
import tiny
from bits import needs_kernels
from moaspec.backends import linear_backends
from moaspec.backends.cpu import build, compiler_flags, structures
from moaspec.backends.cpu.build import must_compile, why_not
from moaspec.backends.cpu.cpu_attention import can_attend
from moaspec.backends.cpu.matrix import Matrix
from moaspec.backends.fast_target import accelerate
from moaspec.backends.linear_backends import CpuKernelLinear, Fp16Linear, OneDnnLinear, can_pack
from moaspec.backends.pack import PackedLinear
from tiny import PROMPTS, fresh_target, random_drafter

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 32,
}
"""Such as kernels take."""

needs_cpu = pytest.mark.skipif(not torch.cpu._is_avx2_supported(), reason="the CPU has no AVX2")


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has not looked for kernels yet, and whose cache is empty."""
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path))
    monkeypatch.delenv(build.SWITCH, raising=False)
    build._loaded.cache_clear()
    yield tmp_path
    build._loaded.cache_clear()


def script(path: Path, *lines: str) -> str:
    """A compiler."""
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == build.__name__ and record.levelno >= logging.WARNING
    ]


def left_behind(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def assert_why(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """That is the reason, everybody learns it, and a warning says it once."""
    found = why_not()
    assert found is not None
    assert reason in found
    assert why_not() == found
    (warning,) = warnings(caplog)
    assert found in warning
    weight_OI = torch.ones(32, 32).bfloat16()
    assert not Matrix.can_hold(weight_OI)
    assert not Matrix.can_hold(weight_OI, bits=4)
    heads = weight_OI[None, None]
    assert not can_attend(heads, heads, heads, None)


@needs_cpu
@pytest.mark.parametrize("asked", ["/dev/null/g++", "no such compiler"])
def test_a_compiler_that_does_not_exist(
    asked: str, afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", asked)
    assert not must_compile()
    assert_why(asked, caplog)
    assert left_behind(afresh) == []


@needs_cpu
def test_no_compiler_at_all(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(afresh))
    assert_why("looked for g++, clang++, c++", caplog)


@needs_kernels
def test_the_library_of_a_wheel_needs_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, compiled = build._wanted()[0], build._compiled()
    (tmp_path / "compiled").mkdir()
    shipped = Path(shutil.copy(compiled, tmp_path / "compiled" / f"{name}.so"))
    monkeypatch.setattr(build, "SHIPPED", shipped.parent)
    monkeypatch.setenv("MOASPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/dev/null/g++")
    build._loaded.cache_clear()
    try:
        assert not must_compile()
        assert why_not() is None
        monkeypatch.setattr(build, "_wanted", lambda: ["none", name])  # a set that it lacks
        monkeypatch.setitem(compiler_flags.INSTRUCTIONS, "none", ())
        build._loaded.cache_clear()
        assert why_not() is None
        os.truncate(shipped, shipped.stat().st_size // 2)
        build._loaded.cache_clear()
        assert "no C++ compiler" in str(why_not())
    finally:
        build._loaded.cache_clear()


@needs_cpu
@pytest.mark.parametrize(
    ("line", "reason"),
    [("echo no such flag >&2; exit 1", "no such flag"), ("exit 3", "no message")],
)
def test_a_compiler_that_fails(
    line: str,
    reason: str,
    afresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", script(afresh / "failing", line))
    assert_why(reason, caplog)
    assert left_behind(afresh) == [afresh / "failing"]


@needs_cpu
def test_a_compiler_that_never_ends(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", script(afresh / "slow", "exec sleep 60"))
    monkeypatch.setattr(build, "TIMEOUT_S", 0.2)
    assert_why("more than 0 s", caplog)
    assert left_behind(afresh) == [afresh / "slow"]


@needs_cpu
def test_a_compiler_that_writes_no_library(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", script(afresh / "silent", "exit 0"))
    assert_why("could not be stored or loaded", caplog)


@needs_cpu
def test_a_cache_that_cannot_be_written(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is in its place: rights would not stop root."""
    (afresh / "file").touch()
    monkeypatch.setenv("MOASPEC_CACHE", str(afresh / "file" / "below"))
    assert_why("could not be stored or loaded", caplog)
    assert left_behind(afresh) == [afresh / "file"]


@needs_cpu
def test_an_unknown_set_of_instructions_is_told(
    afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", script(afresh / "failing", "exit 3"))
    monkeypatch.setenv(build.SWITCH, "avx-512")
    assert why_not() is not None
    assert why_not() is not None  # told once
    assert [text for text in caplog.messages if text.startswith(build.SWITCH)] == [
        "MOASPEC_KERNELS=avx-512 is ignored; it must be off, avx2, avxvnni, avx512, amx or unset."
    ]


@needs_cpu
@pytest.mark.parametrize("value", ["off", "OFF", "0", "false"])
def test_they_can_be_switched_off(
    value: str, afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(build.SWITCH, value)
    assert not must_compile()
    assert why_not() == "MOASPEC_KERNELS is off"
    assert warnings(caplog) == []
    assert left_behind(afresh) == []


@needs_cpu
@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize(
    ("has_bf16", "has_amx", "granted", "has_vnni", "names"),
    [
        (True, True, True, True, ["amx", "avx512", "avxvnni", "avx2"]),
        (True, True, False, False, ["avx512", "avx2"]),
        (True, False, True, False, ["avx512", "avx2"]),
        (False, True, True, True, ["avxvnni", "avx2"]),
        (False, True, True, False, ["avx2"]),
    ],
)
def test_what_kernels_are_compiled_for(
    has_bf16: bool,
    has_amx: bool,
    granted: bool,
    has_vnni: bool,
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`granted`: the system lets this process have tile registers."""
    for name, answer in (
        ("_is_avx512_bf16_supported", has_bf16),
        ("_is_vnni_supported", has_bf16),
        ("_init_amx", granted),
    ):
        monkeypatch.setattr(torch.cpu, name, lambda answer=answer: answer)
    real = torch.cpu.get_capabilities()
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {**real, "amx_bf16": has_amx, "avx_vnni": has_vnni}
    )
    assert build.supported() == build._wanted() == names
    for asked in names:
        monkeypatch.setenv(build.SWITCH, asked)
        assert build._wanted() == names[names.index(asked) :]


@pytest.mark.slow
@needs_kernels
def test_a_compiler_that_knows_no_avx512(
    counting: Path, afresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    working = os.environ["CXX"]
    refuse = 'case "$*" in *-mavx512*) exit 1;; esac'
    monkeypatch.setenv("CXX", script(afresh / "older", refuse, f'exec {working} "$@"'))
    assert why_not() is None
    assert counting.read_text().splitlines() == ["compiled"]


@pytest.mark.usefixtures("afresh")
def test_other_cpus_do_without_and_nobody_is_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx2_supported", lambda: False)
    assert why_not() == "they are for Linux on CPUs with AVX2"
    assert warnings(caplog) == []


@needs_cpu
@pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="oneDNN cannot pack weights here"
)
def test_without_kernels_text_comes_by_other_libraries(
    afresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(afresh / "nothing"))
    target, stock = fresh_target(**SIZES), fresh_target(**SIZES)
    for one in (target, stock):
        one.model.bfloat16()
    drafter = random_drafter(target).bfloat16()
    assert accelerate(target)
    assert tiny.fast_layers(target).fused is None
    down = target.model.model.layers[0].mlp.down_proj
    assert isinstance(down, PackedLinear)
    assert type(down._backend) is (
        OneDnnLinear if linear_backends._bf16_instructions() else Fp16Linear
    )
    assert down.matrix is None
    results = moaspec.generate(
        target, PROMPTS, drafter=drafter, tree=moaspec.Tree(3, 3, 8), max_new_tokens=12
    )
    # Passes of other sizes differ in their last bits: what was drafted may part at ties.
    assert all(len(result.token_ids) == 12 for result in results)
    text = moaspec.generate(target, PROMPTS[2], max_new_tokens=4).token_ids
    ids_BT = torch.tensor([PROMPTS[2]])
    logits_V = target.head(target.capture(ids_BT, torch.ones_like(ids_BT)).hidden_BTE[0, -1])
    exact_V = stock.head(stock.capture(ids_BT, torch.ones_like(ids_BT)).hidden_BTE[0, -1])
    # Roundings to bf16 in other places; logits of these models are in the tens.
    assert float((logits_V - exact_V).norm()) < 0.1 * float(exact_V.norm())
    assert text[0] == int(logits_V.argmax())


# Building


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that was compiled for these tests, away from caches."""
    if why_not() is not None:
        pytest.skip(f"no kernels: {why_not()}")
    place = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOASPEC_CACHE", str(place))
        library = build._compiled()
    assert left_behind(place) == [library]
    return library


@pytest.fixture
def counting(
    compiled: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A compiler that notes every call in a file, and hands out the library that exists."""
    place = tmp_path_factory.mktemp("compiler")
    lines = (
        f"echo compiled >> {place}/calls",
        'while [ "$1" != -o ]; do shift; done',
        "sleep 0.5",
        f'cp {compiled} "$2"',
    )
    monkeypatch.setenv("CXX", script(place / "compiler", *lines))
    return place / "calls"


@pytest.mark.slow
@needs_kernels
def test_a_cached_build_is_not_compiled_again(counting: Path, afresh: Path) -> None:
    assert must_compile()
    for _ in range(3):
        build._loaded.cache_clear()
        assert why_not() is None
        assert not must_compile()
    assert counting.read_text().splitlines() == ["compiled"]
    (library,) = left_behind(afresh)
    assert library.suffix == ".so"
    assert build.library().moaspec_product is not None


@pytest.mark.slow
@needs_kernels
def test_another_source_is_compiled(
    counting: Path, afresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not() is None
    changed = afresh.parent / f"{afresh.name}-sources"
    shutil.copytree(build.SOURCES, changed)
    monkeypatch.setattr(build, "SOURCES", changed)
    monkeypatch.setattr(build, "MAIN", changed / build.MAIN.name)
    for source in ("kernels.cpp", "attention.h"):
        with (changed / source).open("a") as file:
            file.write("\n")
        build._loaded.cache_clear()
        assert why_not() is None
    monkeypatch.setattr(build, "FLAGS", (*compiler_flags.FLAGS, "-g"))
    build._loaded.cache_clear()
    assert why_not() is None
    assert counting.read_text().splitlines() == ["compiled"] * 4
    assert len(left_behind(afresh)) == 4


PROCESS = """
import torch
from moaspec.backends.cpu.build import why_not
from moaspec.backends.cpu.matrix import Matrix
assert why_not() is None, why_not()
weight = torch.ones(16, 32).bfloat16()
assert Matrix(weight, None).product(weight[:1]).tolist() == [[32.0] * 16]
"""


@pytest.mark.slow
@needs_kernels
def test_processes_that_build_at_once(counting: Path, afresh: Path) -> None:
    """Whoever is last replaces what is there by the same; nobody loads half a file."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-c", PROCESS], env=environment) for _ in range(3)]
    assert [one.wait(timeout=300) for one in running] == [0, 0, 0]
    assert len(left_behind(afresh)) == 1
    assert 1 <= len(counting.read_text().splitlines()) <= 3


@pytest.mark.slow
@needs_kernels
def test_a_build_that_is_killed_leaves_no_library(counting: Path, afresh: Path) -> None:
    """What it has written so far has another name."""
    working = os.environ["CXX"]
    lines = ('while [ "$1" != -o ]; do shift; done', 'echo half > "$2"', "kill -9 $PPID")
    Path(working).rename(counting.parent / "working")
    script(Path(working), *lines)
    assert subprocess.run([sys.executable, "-c", PROCESS], check=False).returncode == -9
    (half,) = left_behind(afresh)
    assert not half.name.startswith("cpu-")
    (counting.parent / "working").rename(working)
    assert why_not() is None


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("harm", ["half", "another", "cut"])
def test_a_damaged_library_is_made_anew(counting: Path, afresh: Path, harm: str) -> None:
    assert why_not() is None
    assert counting.exists()
    (library,) = left_behind(afresh)
    contents = {
        "half": b"half a library",
        "another": Path(torch._C.__file__).read_bytes(),
        "cut": library.read_bytes()[: library.stat().st_size // 2],  # killed who loaded it
    }
    library.unlink()  # this process has it mapped, and would not open it again
    library.write_bytes(contents[harm])
    library.chmod(0o700)
    code = "from moaspec.backends.cpu.build import why_not; print(why_not())"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "None\n"
    assert len(counting.read_text().splitlines()) == 2


@pytest.mark.slow
@needs_kernels
def test_a_planted_library_is_not_loaded(
    counting: Path, afresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that others may have written; kernels are compiled into a place of this user's own."""
    own = afresh / "own"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    planted = build._compiled()
    planted.write_bytes(b"planted")
    planted.chmod(0o777)
    assert must_compile()
    assert why_not() is None
    assert planted.read_bytes() == b"planted"
    assert counting.read_text().splitlines() == ["compiled"] * 2
    (made,) = own.rglob("*.so")
    assert made.stat().st_mode & 0o077 == 0
    assert [record.name for record in caplog.records].count("moaspec.support.paths") == 1


@needs_kernels
def test_threads_are_pytorchs() -> None:
    """One OpenMP library in the process: two would wait for each other's idle threads."""
    build.library()
    mapped = {
        Path(line.split(maxsplit=5)[5].strip()).resolve()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if Path(line.split(maxsplit=5)[-1].strip()).name.startswith(
            ("libgomp", "libomp", "libiomp")
        )
    }
    assert len(mapped) == 1, mapped


@needs_kernels
def test_every_call_of_the_library_is_there() -> None:
    library = build.library()
    assert isinstance(library, ctypes.CDLL)
    for name in ("product", "project", "finish", "attend", "stack"):
        assert getattr(library, f"moaspec_{name}") is not None


@needs_kernels
def test_packed_layers_have_kernels() -> None:
    packed = PackedLinear(torch.nn.Linear(64, 33).bfloat16())
    assert type(packed._backend) is CpuKernelLinear
    assert packed.matrix is not None


@needs_kernels
def test_structures_are_those_of_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is missing here, or of another size, is noticed before a call reads it."""
    structures.check_layouts(build.library())
    short = type("Short", (ctypes.Structure,), {"_fields_": structures.SamplerStruct._fields_[:-1]})
    shared = [short if one is structures.SamplerStruct else one for one in structures.SHARED]
    monkeypatch.setattr(structures, "SHARED", shared)
    with pytest.raises(OSError, match="differ"):
        structures.check_layouts(build.library())
