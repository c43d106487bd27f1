"""Whole models on jaxops, and the command that trains them: `python -m models.train lm`, `dit` or `mm`.

What a user gives wrongly is a ValueError, of an option a typer.BadParameter: a sentence that stands where it is raised.
Docstrings name errors only of functions that loops of your own call.
"""
