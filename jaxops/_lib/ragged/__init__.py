"""Ragged rows: offsets on the device, tiles, the work list."""
