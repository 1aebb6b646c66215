"""Training configurations that the package contains."""

from pathlib import Path

from moaspec.errors import InputError

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
        with path.open("x", encoding="utf-8") as file:
            file.write((RECIPES / path.name).read_text(encoding="utf-8"))
    except FileExistsError as error:
        raise InputError(f"{path} exists; rename or remove it first.") from error
    return path
