"""`python -m moaspec`, which `torchrun -m moaspec` needs."""

from moaspec.cli.main import run

run()
