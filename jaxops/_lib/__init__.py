"""Leaf code with no knowledge of any op."""
