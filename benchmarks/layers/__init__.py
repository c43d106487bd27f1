"""Benchmarks of layers."""
