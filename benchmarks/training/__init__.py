"""Benchmarks of models: training, offloading, decoding, precision."""
