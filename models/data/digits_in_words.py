"""Captions of handwritten digits, written in several ways, and what digit a caption names."""

import functools

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@functools.cache
def captions_of(digit: int) -> tuple[str, ...]:
    """All captions of a digit from 0 to 9.

    >>> captions_of(8)
    ('an eight', 'the digit 8', 'one more than seven', 'one less than nine')
    """
    found = [f"{'an' if digit == 8 else 'a'} {WORDS[digit]}", f"the digit {digit}"]
    if digit > 0:
        found.append(f"one more than {WORDS[digit - 1]}")
    if digit < 9:
        found.append(f"one less than {WORDS[digit + 1]}")
    return tuple(found)


def digit_in(caption: str) -> int | None:
    """The digit that a caption of `captions_of` names; None for any other text."""
    return next((digit for digit in range(10) if caption in captions_of(digit)), None)
