"""Launches, schedules and masks of Pallas kernels."""
