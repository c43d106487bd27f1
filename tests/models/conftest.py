"""Runs with the same settings in one process share their compiled step and evaluation, most of a test's time."""

import functools

from models import train_dit, train_lm

for _module in (train_lm, train_dit):
    for _name in ("make_step", "make_evaluate"):
        setattr(_module, _name, functools.cache(getattr(_module, _name)))
