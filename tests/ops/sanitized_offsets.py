"""The sizes and offsets of what compute-sanitizer runs; see tests/sanitize.py."""

M, K, N = 300, 200, 136  # no multiple of any tile there
OFFSETS = [[0, 70, 70, 300], [11, 40, 168, 290], [-9, 50, 90, 400], [250, 100, 299, 300], [2**31 - 1, -(2**31), 7, 300]]
