"""Acceleration of targets and drafters: packed weights, CPU kernels, CUDA graphs, quantisation."""
