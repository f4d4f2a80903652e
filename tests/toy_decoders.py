"""Decoders for tests of generation: a small recurrent one of our own, and tiny `transformers` twins made to fit.

They keep the promises of regard.generation.loop; they know nothing of how tokens are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 41


class Hidden:
    """The state of `Recurrent`: one vector a row."""

    def __init__(self, h: Tensor, length: int) -> None:
        self.h, self.length = h, length  # (B, d)

    def keep(self, rows: Tensor) -> None:
        self.h = self.h[rows]

    def __len__(self) -> int:
        return self.length


class Recurrent(nn.Module):
    """A GRU of random weights: what it says depends on all tokens before, and on no padding."""

    def __init__(self, seed: int = 0, vocab: int = VOCAB, d: int = 13) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.cell, self.head = nn.Embedding(vocab, d), nn.GRUCell(d, d), nn.Linear(d, vocab)
        for p in self.parameters():
            nn.init.normal_(p, std=1.0)
        self.begun: list[dict[str, Any]] = []
        self.steps = 0

    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, Hidden]:
        self.begun.append({"shape": tuple(ids.shape), "length": length})
        state = Hidden(ids.new_zeros(ids.shape[0], self.cell.hidden_size, dtype=self.head.weight.dtype), 0)
        for n in range(ids.shape[1]):
            new = self.cell(self.embed(ids[:, n]), state.h)
            state.h = new if mask is None else torch.where(mask[:, n, None], new, state.h)
        state.length = ids.shape[1]
        return self.head(state.h), state

    def step(self, state: Hidden, tokens: Tensor) -> Tensor:
        self.steps += 1
        state.h = self.cell(self.embed(tokens), state.h)
        state.length += 1
        return self.head(state.h)


class Kept:
    """The state of a twin: its cache, its mask, and for an encoder–decoder what the encoder said."""

    def __init__(self, cache: Any, mask: Tensor, memory: Tensor | None = None) -> None:
        self.cache, self.mask, self.memory = cache, mask, memory

    def keep(self, rows: Tensor) -> None:
        self.cache.reorder_cache(rows)
        self.mask = self.mask[rows]
        self.memory = None if self.memory is None else self.memory[rows]

    def __len__(self) -> int:
        return int(self.cache.get_seq_length())


@dataclass
class Causal:
    """A `transformers` decoder-only model."""

    model: Any

    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, Kept]:
        from transformers import DynamicCache

        state = Kept(DynamicCache(config=self.model.config), torch.ones_like(ids) if mask is None else mask.long())
        return self._run(state, ids), state

    def step(self, state: Kept, tokens: Tensor) -> Tensor:
        state.mask = torch.cat([state.mask, torch.ones_like(tokens)[:, None]], 1)
        return self._run(state, tokens[:, None])

    def _run(self, state: Kept, ids: Tensor) -> Tensor:
        places = (state.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model(
            ids, attention_mask=state.mask, position_ids=places, past_key_values=state.cache, use_cache=True
        )
        return out.logits[:, -1]


@dataclass
class Seq2Seq:
    """A `transformers` encoder–decoder, with the sources it is to read."""

    model: Any
    source: Tensor
    source_mask: Tensor

    def begin(self, ids: Tensor, mask: Tensor | None, *, length: int) -> tuple[Tensor, Kept]:
        from transformers import DynamicCache, EncoderDecoderCache

        assert mask is None
        memory = self.model.get_encoder()(self.source, attention_mask=self.source_mask.long()).last_hidden_state
        cache = EncoderDecoderCache(DynamicCache(config=self.model.config), DynamicCache(config=self.model.config))
        state = Kept(cache, self.source_mask.long(), memory)
        return self._run(state, ids), state

    def step(self, state: Kept, tokens: Tensor) -> Tensor:
        return self._run(state, tokens[:, None])

    def _run(self, state: Kept, ids: Tensor) -> Tensor:
        out = self.model(
            encoder_outputs=(state.memory,),
            attention_mask=state.mask,
            decoder_input_ids=ids,
            past_key_values=state.cache,
            use_cache=True,
        )
        return out.logits[:, -1]


def twin(family: str, seed: int = 0) -> Any:
    """A tiny random model whose weights are large enough that it does not say one token for ever."""
    import transformers as hf

    torch.manual_seed(seed)
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": False}
    if family == "gpt2":
        model = hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=VOCAB, n_positions=257, n_embd=24, n_layer=2, n_head=3, **none)
        )
    elif family == "t5":
        config = hf.T5Config(
            vocab_size=VOCAB, d_model=24, d_kv=8, d_ff=37, num_layers=2, num_heads=3, decoder_start_token_id=0, **none
        )
        model = hf.T5ForConditionalGeneration(config)
    else:
        sizes = {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in SIZES.items()}
        config = hf.BartConfig(
            vocab_size=VOCAB,
            d_model=24,
            max_position_embeddings=257,
            decoder_start_token_id=0,
            forced_eos_token_id=None,
            **sizes,
            **none,
        )
        model = hf.BartForConditionalGeneration(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 2:
                p.normal_(std=next((std for part, std in STD.items() if part in name), 0.5))
    model.generation_config = hf.GenerationConfig(decoder_start_token_id=0, pad_token_id=0)
    return model.eval()


# What was said last, and where, outweighs what the encoder says, which stays the same.
STD = {
    "wte": 2.0,
    "wpe": 2.0,
    "shared": 1.5,
    "embed_positions": 2.0,
    "EncDecAttention.o": 0.2,
    "out_proj": 0.1,
    "relative_attention_bias": 3.0,
    "lm_head": 0.3,
}
SIZES = {"layers": 2, "attention_heads": 3, "ffn_dim": 37}


def padded(*lengths: int, first: int = 1, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Random prompts of these lengths, padded on the left with token 0, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    widest = max(lengths)
    mask = torch.arange(widest) >= widest - torch.tensor(lengths)[:, None]
    ids = torch.randint(first, VOCAB, (len(lengths), widest), generator=generator)
    return torch.where(mask, ids, 0), mask
