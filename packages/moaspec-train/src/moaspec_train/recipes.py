"""Training configurations that the package contains."""

from pathlib import Path

from moaspec_core.errors import InputError

RECIPES = Path(__file__).parent / "configs"


def recipes() -> dict[str, str]:
    """The description of each configuration (the first line of its comment), by name."""
    return {
        path.stem: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        for path in sorted(RECIPES.glob("*.yaml"))
    }


def write_recipe(name: str, directory: Path) -> Path:
    """Copy a configuration to `directory/name.yaml`; InputError if it is unknown, or there."""
    if name not in recipes():
        raise InputError(f"Unknown configuration {name!r}; choose one of {', '.join(recipes())}.")
    path = directory / f"{name}.yaml"
    try:
        path.touch(exist_ok=False)
    except FileExistsError as error:
        raise InputError(f"{path} exists; rename or remove it first.") from error
    try:
        path.write_bytes((RECIPES / path.name).read_bytes())
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path
