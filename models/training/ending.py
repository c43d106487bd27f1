"""Early ends of a run, in one line each: SIGTERM or Ctrl-C, which save first, and a full disk."""

import contextlib
import errno
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import typer
from jax.experimental import multihost_utils

from models.training.finite import NotFinite

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("No space left", "Disk quota exceeded")  # of TensorStore, whose errors have no errno


class Stopped(BaseException):
    """A signal, by its number, stopped the run."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[int], int | None]]:
    """Gives a function of the steps done: the signal to stop for now, the same in all processes, or None.

    Inside, SIGTERM and Ctrl-C are recorded, and a second one of either ends the process at once.
    """
    first: list[int] = []
    several = jax.process_count() > 1

    def note(number: int, _: Any) -> None:
        first.append(number)
        if several:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            for each in SIGNALS:
                signal.signal(each, signal.SIG_DFL)

    def asked(done: int) -> int | None:
        if not several:
            return first[0] if first else None
        if not multihost_utils.reached_preemption_sync_point(done):
            return None
        return first[0] if first else signal.SIGTERM

    # JAX's own handler of SIGTERM lets all processes stop at one step. Handlers are of the main thread alone.
    own = (signal.SIGINT,) if several else SIGNALS
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, note) for number in own} if is_main else {}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def kept(steps: list[int] | None, out: Path) -> str:
    """The line about the finished checkpoints of the run in `out`, and this process's command to go on from there.

    steps: None for a run without checkpoints.
    """
    if steps is None:
        return "Nothing was saved: with --save-every N a run writes checkpoints."
    if not steps:
        return "No checkpoint was finished."
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if not any(word.split("=")[0] == "--out" for word in words):
        words += ["--out", str(out)]
    command = " ".join(["python -m models.train", *map(shlex.quote, words), "--resume"])
    return f"The checkpoint of step {steps[-1]} is kept; go on with: {command}"


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk caused it."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in FULL) or any(words in str(error) for words in FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def in_one_line(kept: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """A signal, a full disk or a loss that is not finite ends the command with a line, which says what is `kept`, and
    an exit code; other errors keep their traceback.
    """

    def stop(number: int, _: Any) -> None:
        raise Stopped(number)

    main = threading.current_thread() is threading.main_thread() and jax.process_count() == 1
    before = signal.signal(signal.SIGTERM, stop) if main else None
    try:
        with quiet_writers():
            yield
    except (Stopped, KeyboardInterrupt) as stopped:
        number = stopped.number if isinstance(stopped, Stopped) else signal.SIGINT
        say(f"Stopped by {signal.Signals(number).name}. {kept()}")
        raise typer.Exit(128 + number) from None
    except NotFinite as error:
        say(
            f"{error} The run ends without a model. The same settings compute the same steps again: for others, such "
            f"as a lower learning_rate, take another folder with --out. {kept()}"
        )
        raise typer.Exit(1) from None
    except Exception as error:
        if not is_full(error):
            raise
        say(f"No space is left on the disk: free some. {kept()}")
        raise typer.Exit(1) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def quiet_writers() -> Iterator[None]:
    """Without the tracebacks of Orbax's, TensorStore's and TensorBoard's threads and coroutines.

    The first two raise the same error in the main thread. After a damaged array Orbax abandons the other reads, which
    then find no event loop.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hooks = [logger.level for logger in loggers], (threading.excepthook, sys.unraisablehook)

    def unless_known(hook: Callable[[Any], Any]) -> Callable[[Any], None]:
        def run(args: Any) -> None:
            files = [Path(frame.filename) for frame in traceback.extract_tb(args.exc_traceback)]
            theirs = {part for file in files for part in file.parts} & {"orbax", "tensorstore", "tensorboardX"}
            if not (theirs or is_full(args.exc_value) or str(args.exc_value) == "Event loop is closed"):
                hook(args)

        return run

    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    threading.excepthook, sys.unraisablehook = map(unless_known, hooks)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        threading.excepthook, sys.unraisablehook = hooks
