"""Loads the compiled `kernels.cpp`: a wheel's, or compiled here.

It is compiled once for each version of sources, flags and compiler.
"""

import _ctypes
import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import Tensor

from moaspec.backends.cpu.compiler_flags import COMPILERS, FLAGS, INSTRUCTIONS
from moaspec.backends.cpu.structures import check_layouts
from moaspec_core.errors import InputError
from moaspec_core.support.paths import make_private, trusted
from moaspec_core.support.seals import is_sealed_file, seal_file
from moaspec_core.support.switches import setting

SOURCES = Path(__file__).parent / "cpp"
MAIN = SOURCES / "kernels.cpp"
SHIPPED = Path(__file__).parent / "compiled"
"""Libraries that a wheel carries, one for each name in `INSTRUCTIONS`."""
TIMEOUT_S = 300.0
SWITCH = "MOASPEC_KERNELS"
"""Environment variable: "off": no kernels; a name in `INSTRUCTIONS`: this set at most."""

log = logging.getLogger(__name__)


class _UnavailableError(Exception):
    """This machine cannot run kernels; the message says why."""


class _NoCompilerError(Exception):
    """There is no C++ compiler; the message says which were looked for."""


def why_not() -> str | None:
    """The reason why this process has no kernels; None if it has them."""
    return _loaded()[1]


def must_compile() -> bool:
    """Whether the first use of kernels will compile them, which takes time."""
    try:
        return _found(_wanted()[0]) is None
    except (_UnavailableError, _NoCompilerError, OSError, InputError):
        return False


def library() -> ctypes.CDLL:
    """The library of kernels; `why_not()` must be None."""
    found, reason = _loaded()
    assert found is not None, reason
    return found


def call(kernel: Any, *arguments: object) -> Any:
    """Call a kernel: tensors as addresses, integers as int64, and the number of threads last."""
    return kernel(*map(_as_c, arguments), ctypes.c_int32(torch.get_num_threads()))


def _as_c(argument: object) -> object:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int64(argument) if isinstance(argument, int) else argument


def unpacks_exactly() -> bool:
    """Whether products with weights of 8 or 4 bits have the same bits as with these in bf16."""
    return instructions() in {"amx", "avx512"}


def instructions() -> str | None:
    """The name in `INSTRUCTIONS` that the kernels here were compiled for; None without kernels."""
    if why_not() is not None:
        return None
    library().moaspec_instructions.restype = ctypes.c_char_p
    return library().moaspec_instructions().decode()


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        return _opened(_compiled()), None
    except _UnavailableError as error:
        return None, str(error)
    except _NoCompilerError as error:
        reason = str(error)
    except (OSError, InputError) as error:
        reason = f"the compiled kernels could not be stored or loaded ({error})"
    except subprocess.TimeoutExpired:
        reason = f"compiling them took more than {TIMEOUT_S:.0f} s"
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no message"]
        reason = f"the compiler failed ({last[0]})"
    log.warning("Decoding takes two to three times as long without moaspec's kernels: %s.", reason)
    return None, reason


def _opened(path: Path) -> ctypes.CDLL:
    """Load the library; compile one again, once, that the linker refuses."""
    try:
        return _checked(path)
    except OSError:
        if path.parent == SHIPPED:
            return _checked(_compiled_for(path.stem, shipped=False))
        path.unlink()
        return _checked(_compiled())


def _checked(path: Path) -> ctypes.CDLL:
    """Load the library; OSError if it was compiled from other sources."""
    library = ctypes.CDLL(str(path))
    try:
        check_layouts(library)
    except OSError:
        _ctypes.dlclose(library._handle)  # else the next load of this path returns the same library
        raise
    return library


def supported() -> list[str]:
    """Names in `INSTRUCTIONS` that this CPU has, the fastest first; none on other systems."""
    if platform.system() != "Linux" or not torch.cpu._is_avx2_supported():
        return []
    has_avx512 = torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported()
    has = {
        "amx": has_avx512 and _has_tiles(),
        "avx512": has_avx512,
        "avxvnni": bool(torch.cpu.get_capabilities().get("avx_vnni")),
        "avx2": True,
    }
    return [name for name in INSTRUCTIONS if has[name]]


def _wanted() -> list[str]:
    """Names in `INSTRUCTIONS` to compile for, the fastest first; _UnavailableError for none."""
    asked = setting(SWITCH, *reversed(INSTRUCTIONS))
    if asked == "off":
        raise _UnavailableError(f"{SWITCH} is off")
    names = supported()
    if not names:
        raise _UnavailableError("they are for Linux on CPUs with AVX2")
    return names[names.index(asked) :] if asked in names else names


def _has_tiles() -> bool:
    """Whether the CPU has AMX for bf16 and the system grants this process its use."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16") and torch.cpu._init_amx())


def _compiled() -> Path:
    """The library's path, compiled if missing, for the fastest instruction set here.

    Raises:
        _UnavailableError: nothing can be compiled for this CPU.
        _NoCompilerError: there is no compiler.
        OSError: there is no room for the file.
        subprocess.SubprocessError: the compiler failed.
    """
    *better, last = _wanted()
    for name in better:
        try:
            return _compiled_for(name)
        except subprocess.CalledProcessError:
            log.info("The compiler cannot do %s.", name)
        except _NoCompilerError:
            log.info("The wheel has no kernels for %s.", name)
    return _compiled_for(last)


def _found(name: str, *, shipped: bool = True) -> Path | None:
    """A library that is there: the wheel's, or one that was compiled before."""
    if shipped and _is_whole(SHIPPED / f"{name}.so"):
        return SHIPPED / f"{name}.so"
    final = _library_file((*FLAGS, *INSTRUCTIONS[name]), _compiler())
    return final if _is_whole(final) else None


def _compiled_for(name: str, *, shipped: bool = True) -> Path:
    found = _found(name, shipped=shipped)
    if found is not None:
        return found
    flags, compiler = (*FLAGS, *INSTRUCTIONS[name]), _compiler()
    final = _library_file(flags, compiler)
    log.info("Compiling kernels with %s, once; it took 13 to 60 s on other machines.", compiler)
    make_private(final.parent)
    # Renamed when complete: neither a killed process nor a second one leaves a partial library.
    with NamedTemporaryFile(dir=final.parent, suffix=".so", delete=False) as made:
        try:
            subprocess.run(  # noqa: S603 - a compiler and our own source
                [compiler, *flags, str(MAIN), "-o", made.name],
                check=True,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            Path(made.name).chmod(0o700)  # the compiler may have set other permissions
            seal_file(Path(made.name))
            Path(made.name).replace(final)
        except BaseException:
            Path(made.name).unlink(missing_ok=True)
            raise
    return final


def _is_whole(library: Path) -> bool:
    """Whether a library can be loaded: one that is cut short would kill the process."""
    try:
        return is_sealed_file(library)
    except OSError:
        return False


def _library_file(flags: tuple[str, ...], compiler: str) -> Path:
    """The library's path, named by a hash of sources, flags and compiler."""
    sources = [path.read_bytes() for path in (*sorted(SOURCES.glob("*.h")), MAIN)]
    inputs = (*sources, " ".join(flags).encode(), compiler.encode(), platform.machine().encode())
    digest = hashlib.sha256(b"\0".join(inputs)).hexdigest()[:24]
    return trusted("kernels", f"cpu-{digest}.so")


def _compiler() -> str:
    """The path of a C++ compiler: `$CXX`, else one of `COMPILERS`; or _NoCompilerError."""
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise _NoCompilerError(
        f"no C++ compiler was found (looked for {asked or ', '.join(COMPILERS)}); install one: "
        "apt install g++, dnf install gcc-c++, apk add g++"
    )
