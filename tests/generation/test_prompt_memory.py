"""A prompt of N tokens takes memory in proportion to N: no N×N scores or masks, no N×V logits, no N × 4d at once."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from twins import Twin

from regard.growth import peak_bytes
from regard.models.text import TextModel
from regard.nn import blocks

N, V = 4096, 2003
MODELS = {
    "GPT-2": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=2 * N + 1),
    ),
    "LLaMA": (
        "LlamaForCausalLM",
        transformers.LlamaConfig(
            vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=37, max_position_embeddings=2 * N + 1,
        ),
    ),
}  # fmt: skip


class LargestOutput(TorchDispatchMode):
    """The most numbers that a tensor made by any operation takes in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return made


def prompt(n: int, *, padded: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = torch.randint(3, V, (2, n), generator=torch.Generator().manual_seed(5))
    return ids, torch.arange(n) >= torch.tensor([0, n // 3])[:, None] if padded else None


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@torch.no_grad()
def test_no_operation_of_a_prompt_makes_scores_a_mask_or_logits_of_all_positions(name, padded, tmp_path):
    model, (ids, mask) = Twin(*MODELS[name], tmp_path).ours(torch.float32), prompt(N, padded=padded)
    assert isinstance(model, TextModel)
    with LargestOutput() as prefill:
        model.begin(ids, mask, length=N + 1)
    with LargestOutput() as forward:
        model(ids, mask)
    assert forward.numbers == 2 * N * V  # logits of all positions would be seen
    assert prefill.numbers < N * V / 4 < N * N / 8


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_twice_as_long_takes_twice_the_memory(name, tmp_path):
    model, (ids, _) = Twin(*MODELS[name], tmp_path).ours(torch.float32), prompt(2 * N, padded=False)
    half, whole = (
        peak_bytes(lambda n=n: model.begin(ids[:, :n], None, length=n + 1), torch.device("cpu")) for n in (N, 2 * N)
    )
    assert whole < 2.1 * half
    assert whole < (2 * N) ** 2  # a byte for each cell of N×N, as booleans take


def test_the_inner_vectors_of_a_feed_forward_are_never_all_there():
    rows, d, inner = 5003, 4, 512
    layer, x = blocks.FeedForward(d, inner, "gelu").eval(), torch.randn(1, rows, d)
    with torch.no_grad():
        taken = peak_bytes(lambda: layer(x), torch.device("cpu"))
    assert taken <= 4 * (blocks.INNER["cpu"] + 4 * rows * d)
    assert peak_bytes(lambda: layer(x), torch.device("cpu")) >= 4 * rows * inner  # with gradients they are
