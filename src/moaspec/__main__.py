"""`python -m moaspec`, which `torchrun -m moaspec` needs."""

from moaspec.cli.entry import run

run()
