"""Speculative decoding by prompt look-up: tokens that followed the last ones earlier in the text are read ahead.

    text     the cat sat on the mat. the cat ┊ sat on the        ← draft, copied from where "the cat" stood before
    chosen                                     sat on a          ← one pass gives the logits after each of them

Tokens are chosen from logits as in every other loop; a draft decides only how many of them one pass gives. The first
chosen token that is not the draft's ends it, and the cache forgets what was read beyond (Saxena 2023; verification as
in Leviathan et al. 2023, where the draft has probability 1).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from regard.op import observed

NGRAM = 2  # longest run of last tokens that is looked up, as in transformers


class DraftReader:
    """A decoder that reads drafts: `step` gives the logits of the next position, a pass of the model several of them.

    decoder: with `step`, and with `extend(state, tokens (B, n))` → logits (B, n, V) after each of them.
    state: after the prompt; with `crop(length)`, and `one_by_one`, None or why the decoder cannot extend it.
    history: (N + T, B), the prompts and after them the rows in which the tokens are written.
    most: tokens of a draft.  ngram: of last tokens to look up, and then ever fewer, down to one.

    A draft goes on as long as it is right for every row that is alive: the cache has one length for all rows.
    """

    def __init__(self, decoder: Any, state: Any, history: Tensor, most: int, ngram: int) -> None:
        reason = getattr(state, "one_by_one", "it has no `extend`")
        if reason is not None:
            raise ValueError(
                f"prompt_lookup_num_tokens={most} reads several tokens at once, and this model cannot: {reason}. Leave "
                "prompt_lookup_num_tokens out"
            )
        self.decoder, self.state, self.history = decoder, state, history
        self.most, self.ngram, self.passes = most, ngram, 1
        self._drafts = history[:0]  # (n, B) of the last pass
        self._logits = torch.empty(0)  # (B, n + 1, V) of the last pass with drafts
        self._end = 0  # tokens of the history before the drafts
        self._alive = torch.ones_like(history[0], dtype=torch.bool)  # (B,)

    def step(self, end: int, ended: Tensor) -> Tensor:
        """Logits (B, V) after the first `end` tokens of the history. ended: (B,), where the last one ended the row."""
        self._alive &= ~ended
        last, read = self.history[end - 1], end - self._end  # (B,); drafts that the logits are after
        if 0 < read <= len(self._drafts) and bool(((self._drafts[read - 1] == last) | ~self._alive).all()):
            return self._logits[:, read]
        self.state.crop(end - 1)
        self.passes += 1
        drafts = None if observed() else self._find(end)  # who observes is told of each token, and of no other
        if drafts is None:
            self._drafts = self.history[:0]
            return cast(Tensor, self.decoder.step(self.state, last))
        self._drafts, self._end = drafts, end
        self._logits = self.decoder.extend(self.state, torch.cat([last[None], drafts]).T)
        return self._logits[:, 0]

    def _find(self, end: int) -> Tensor | None:
        """Drafts (n, B) that followed the latest place of each row's last tokens; None if no row has such a place."""
        count = min(self.most, len(self.history) - end - 1)  # the last token is chosen, and not read
        if count < 1:
            return None
        text = self.history[:end].T  # (B, end)
        places = torch.arange(1, end, device=text.device)  # where what follows begins
        best = torch.zeros_like(text[:, 0])  # (B,) tokens that agree, then their place
        alike = torch.ones_like(text[:, 1:], dtype=torch.bool)  # (B, end − 1)
        for n in range(min(self.ngram, end - 1)):
            alike = alike & (text.roll(n, 1)[:, : end - 1] == text[:, end - 1 - n, None]) & (places > n)
            best = torch.maximum(best, (alike * (n * end + places)).amax(1))
        found = best > 0
        if not bool((found & self._alive).any()):
            return None
        place = torch.where(found, best % end, end - 1)[:, None]  # else the last token again, which is as good as any
        # A copy that reaches the end goes on with what it has written, as in LZ77: a loop is drafted in full.
        steps = torch.arange(count, device=text.device) % (end - place)  # (B, n)
        return text.gather(1, place + steps).T
