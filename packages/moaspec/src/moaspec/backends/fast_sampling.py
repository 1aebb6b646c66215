"""Sampling by CPU kernels: who imports this module registers them for the process."""

from moaspec.backends.cpu import fused_sampling
from moaspec.sampling.kernels import register

register(fused_sampling)
