"""The training commands, and the loop, settings, presets, checkpoints and reports of their runs."""
