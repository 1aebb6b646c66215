"""Client-server against its alternatives, link by link."""

from moaspec.evaluate.edge.bench import EdgeSettings, run_edge_bench
from moaspec.evaluate.edge.case import MODES, Case, Measured
from moaspec.evaluate.edge.formula import Round, prediction

__all__ = ["MODES", "Case", "EdgeSettings", "Measured", "Round", "prediction", "run_edge_bench"]
