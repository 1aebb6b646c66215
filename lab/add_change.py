"""Add to a drafter's weights what another one learned: base + share x (after - before).

    python lab/add_change.py BASE BEFORE AFTER SHARE OUTPUT

The directories hold drafters of one architecture in one `model.safetensors` each; weights that only
BASE has are kept, as are its config and the head's input moment.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

KEPT = "head_moment"
WEIGHTS = "model.safetensors"


def add_change(base: Path, before: Path, after: Path, share: float, output: Path) -> None:
    """Write the sum, computed in float32 and stored in the base's dtype."""
    weights, old, new = (load_file(one / WEIGHTS) for one in (base, before, after))
    for name in weights.keys() & old.keys() - {KEPT}:
        weight = weights[name]
        if weight.is_floating_point():
            changed = weight.float() + share * (new[name].float() - old[name].float())
            weights[name] = changed.to(weight.dtype)
    output.mkdir(parents=True)
    save_file(weights, output / WEIGHTS, metadata={"format": "pt"})
    shutil.copy(base / "config.json", output)


if __name__ == "__main__":
    paths = [Path(name) for name in sys.argv[1:]]
    add_change(paths[0], paths[1], paths[2], float(sys.argv[4]), paths[4])
