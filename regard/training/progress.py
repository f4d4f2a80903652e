"""Progress of a run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time

__all__ = ["Progress"]

QUIET_SECONDS = 10  # between two lines where stderr is not a terminal


class Progress:
    """Steps done, loss, learning rate, tokens per second and time left.

    Args:
        steps: of the whole run.
        start: steps done before.
        show: print anything at all.
    """

    def __init__(self, steps: int, start: int, *, show: bool) -> None:
        self.steps, self.start, self.show = steps, start, show
        self.terminal = show and sys.stderr.isatty()
        self.began = time.perf_counter()
        self.printed = float("-inf")
        if show and start:
            print(f"resumed after step {start}", file=sys.stderr)

    def update(self, step: int, loss: float, rate: float, speed: float) -> None:
        """Show a step."""
        now = time.perf_counter()
        if not self.show or (not self.terminal and step < self.steps and now - self.printed < QUIET_SECONDS):
            return
        self.printed = now
        left = int((now - self.began) / max(step - self.start, 1) * (self.steps - step))
        hours, minutes = divmod(left // 60, 60)
        clock = f"{hours}:{minutes:02d}:{left % 60:02d}" if hours else f"{minutes}:{left % 60:02d}"
        thousands = f"{speed / 1e6:.1f}M" if speed >= 1e6 else f"{speed / 1e3:.1f}k"
        tokens = thousands if speed >= 1e3 else f"{speed:.0f}"
        text = f"step {step}/{self.steps}  loss {loss:.4f}  lr {rate:.2e}  {tokens} tok/s  {clock} left"
        if self.terminal:
            width = 20
            done = width * step // self.steps
            print(f"\r[{'━' * done}{' ' * (width - done)}] {text}\x1b[K", end="", file=sys.stderr, flush=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def note(self, step: int, loss: float) -> None:
        """Show an evaluation, on a line of its own."""
        if self.show:
            print(f"{chr(13) if self.terminal else ''}step {step}  held-out loss {loss:.4f}", end="", file=sys.stderr)
            print("\x1b[K" if self.terminal else "", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the bar's line."""
        if self.terminal:
            print(file=sys.stderr)
