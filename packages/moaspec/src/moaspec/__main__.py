"""`python -m moaspec`, which `torchrun -m moaspec` needs."""

from moaspec_core.cli.entry import run

run()
