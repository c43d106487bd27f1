"""Early ends of a run, in one line each: SIGTERM or Ctrl-C, which save first, and a full disk."""

import contextlib
import errno
import logging
import os
import select
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import typer
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_WORDS = ("No space left", "Disk quota exceeded")  # of TensorStore, whose errors have no errno


class Stopped(BaseException):
    """A signal, by its number, stopped the run."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class StopSignals:
    """Records SIGTERM and Ctrl-C inside its with statement, for a loop that asks after each step.

    The second signal, or the timeout after the first one, ends the process at once.

    Args:
      seconds: timeout after the first signal.
      last_words: signal number -> the line printed before the process is ended.
    """

    def __init__(self, seconds: float, last_words: Callable[[int], str]):
        self._seconds, self._last_words = seconds, last_words
        self._number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is not threading.main_thread():  # which alone can have handlers
            return self
        several = jax.process_count() > 1
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        # The wake-up descriptor is written at once, even while the main thread compiles or waits for the device.
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        for number in SIGNALS:
            if not (several and number == signal.SIGTERM):  # JAX's own handler lets all processes stop at one step
                self._before[number] = signal.signal(number, self._forward if several else self._note)
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._pipe[1])  # the watching thread reads the end, and closes the other one

    def asked(self, done: int) -> int | None:
        """The signal to stop for now, after `done` steps; the same in all processes."""
        if jax.process_count() == 1:
            return self._number
        if not multihost_utils.reached_preemption_sync_point(done):
            return None
        if (
            self._before and self._number is None
        ):  # else the time has begun with Ctrl-C, and one more would be the second signal
            os.write(self._pipe[1], bytes([signal.SIGTERM]))
        return self._number or signal.SIGTERM

    def _note(self, number: int, _: Any) -> None:
        self._number = self._number or number

    def _forward(self, number: int, _: Any) -> None:
        self._number = number
        os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        number = os.read(self._pipe[0], 1)
        ended = not number
        if number:
            select.select([self._pipe[0]], [], [], self._seconds)
            ready, _, _ = select.select([self._pipe[0]], [], [], 0)
            ended = bool(ready) and not os.read(self._pipe[0], 1)
        if not ended:
            print(self._last_words(number[0]), file=sys.stderr, flush=True)
            os._exit(128 + number[0])
        os.close(self._pipe[0])


def command_to_go_on(out: Path) -> str:
    """This process's command, with --resume, and with the folder that it chose without --out."""
    words = [word for word in sys.argv[1:] if word != "--resume"]
    if not any(word.split("=")[0] == "--out" for word in words):
        words += ["--out", str(out)]
    return " ".join(["python -m models.train", *map(quoted, words), "--resume"])


def quoted(word: str) -> str:
    """A word for a shell, on one line, and in ASCII if the terminal cannot show it: what is pasted is this word."""
    try:
        word.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        shown = False
    else:
        shown = word.isprintable()
    if shown:
        return shlex.quote(word)
    escaped = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(escaped)}'"  # as Bash, Zsh and BusyBox read it


def kept(steps: list[int] | None, out: Path) -> str:
    """The line about the finished checkpoints of the run in `out`; None for a run without checkpoints."""
    if steps is None:
        return "Nothing was saved: with --save-every N a run writes checkpoints."
    if not steps:
        return "No checkpoint was finished."
    return f"The checkpoint of step {steps[-1]} is kept; go on with: {command_to_go_on(out)}"


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk caused it."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in FULL) or any(words in str(error) for words in FULL_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def in_one_line(kept: Callable[[], str], say: Callable[[str], None]) -> Iterator[None]:
    """A signal or a full disk inside ends the command with a line and an exit code; other errors keep their traceback.

    Args:
      kept: returns the line about the finished checkpoints.
      say: prints the line.
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
        say(stopped_line(number, kept()))
        raise typer.Exit(128 + number) from None
    except Exception as error:
        if not is_full(error):
            raise
        say(f"No space is left on the disk: free some. {kept()}")
        raise typer.Exit(1) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def stopped_line(number: int, kept: str) -> str:
    return f"Stopped by {signal.Signals(number).name}. {kept}"


@contextlib.contextmanager
def quiet_writers() -> Iterator[None]:
    """Without the tracebacks of Orbax's, TensorStore's and TensorBoard's threads and coroutines.

    The first two raise the same error in the main thread. After a damaged array Orbax abandons the other reads, which
    then find no event loop.
    """
    loggers, hooks = (
        [logging.getLogger(name) for name in ("absl", "asyncio")],
        (threading.excepthook, sys.unraisablehook),
    )
    levels = [logger.level for logger in loggers]

    def is_known(error: BaseException | None, where: TracebackType | None) -> bool:
        files = {frame.filename for frame in traceback.extract_tb(where)}
        theirs = any(
            f"{os.sep}{name}{os.sep}" in file for file in files for name in ("orbax", "tensorstore", "tensorboardX")
        )
        return theirs or is_full(error) or str(error) == "Event loop is closed"

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if not is_known(args.exc_value, args.exc_traceback):
            hooks[0](args)

    def unraisable(args: Any) -> None:
        if not is_known(args.exc_value, args.exc_traceback):
            hooks[1](args)

    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    threading.excepthook, sys.unraisablehook = of_thread, unraisable
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        threading.excepthook, sys.unraisablehook = hooks
