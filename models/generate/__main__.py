"""`python -m models.generate FOLDER "once upon a time"`."""

from models.generate.command import app

app()
