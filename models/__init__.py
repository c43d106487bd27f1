"""Whole models on jaxops, and the command that trains them: `python -m models.train lm`, `dit` or `mm`."""
