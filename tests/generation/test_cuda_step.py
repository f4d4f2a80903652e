"""A step on the kernels for one row, interpreted where there is no GPU, is the step of the tower under the rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from interpreting import interpreted
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig
from twins import Twin

from regard.generation import cuda_graph, cuda_step
from regard.generation.cuda_graph import can_capture, needs_eager_step
from regard.generation.loop import generate
from regard.models.text import TextModel
from regard.op import observe, unobserve
from regard.testing import assert_rule

pytest.importorskip("triton", reason="needs triton: pip install 'regard[gpu]'")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT2 = GPT2Config(vocab_size=47, n_embd=20, n_layer=2, n_head=5, n_positions=700)
GPT2_OTHER = GPT2Config(vocab_size=31, n_embd=48, n_layer=2, n_head=2, n_positions=700, activation_function="relu")
LLAMA = LlamaConfig(
    vocab_size=53, hidden_size=30, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
    intermediate_size=37, max_position_embeddings=700,
)  # fmt: skip
LLAMA_BIASED = LlamaConfig(
    vocab_size=29, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=23, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu",
    max_position_embeddings=700,
)  # fmt: skip
MODELS = {
    "GPT-2": ("GPT2LMHeadModel", GPT2),
    "GPT-2, relu": ("GPT2LMHeadModel", GPT2_OTHER),
    "LLaMA": ("LlamaForCausalLM", LLAMA),
    "LLaMA with biases": ("LlamaForCausalLM", LLAMA_BIASED),
}


@pytest.fixture(scope="module", autouse=True)
def kernels_run_here() -> Iterator[None]:
    from regard.generation import cuda_kernels

    if DEVICE == "cuda":
        yield
        return
    with interpreted(cuda_kernels):
        yield


def model_of(name: str, directory: Path, dtype: torch.dtype) -> TextModel:
    architecture, config = MODELS[name]
    model = Twin(architecture, config, directory).ours(dtype)
    assert isinstance(model, TextModel)
    return model.to(DEVICE)


def prompt(batch: int, n: int, *, padded: bool) -> tuple[Tensor, Tensor | None]:
    ids = torch.randint(3, 29, (batch, n), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    mask = torch.arange(n) >= (torch.arange(batch) * 3 % n)[:, None]
    return ids, mask.to(DEVICE) if padded else None


@torch.no_grad()
def steps(model: TextModel, ids: Tensor, mask: Tensor | None, new: Tensor, *, by_kernels: bool) -> Tensor:
    """Logits after each of the new tokens (B, steps), one at a time: (steps, B, V)."""
    _, state = model.begin(ids, mask, length=ids.shape[1] + new.shape[1])
    if not by_kernels:
        return torch.stack([model.extend(state, column[:, None])[:, 0] for column in new.T])
    steady = cuda_step.StepBuffers.of(state, model.tower.rotary)
    made = []
    for column in new.T:
        steady.tokens.copy_(column)
        made.append(cuda_step.step(model.tower, model.head, steady))
    return torch.stack(made)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "padded"), [(1, False), (3, True)], ids=["one text", "three texts, padded"])
def test_a_step_by_kernels_is_a_step_of_the_tower(name, batch, padded, tmp_path):
    ids, mask = prompt(batch, 5, padded=padded)
    new = torch.randint(3, 29, (batch, 2), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    model = model_of(name, tmp_path, torch.float32)
    ours = steps(model, ids, mask, new, by_kernels=True)
    baseline = steps(model, ids, mask, new, by_kernels=False)
    truth = steps(model.double(), ids, mask, new, by_kernels=False)
    assert_rule(ours, baseline, truth)


@pytest.mark.parametrize("few", [16, 0], ids=["by the last program", "by a kernel"])
@pytest.mark.parametrize("chunks", [(128,), (64, 256)], ids=["of 128", "wider, since programs would be many"])
def test_keys_of_several_chunks_are_combined(chunks, few, tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_step, "FEW", few)
    monkeypatch.setattr(cuda_step, "CHUNKS", chunks)
    monkeypatch.setattr(cuda_step, "PROGRAMS", 12)
    model = model_of("LLaMA", tmp_path, torch.float32)
    n = 2 * chunks[-1] + 3
    ids, mask = prompt(2, n, padded=True)
    new = torch.randint(3, 29, (2, 2), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    for first in (0, chunks[-1] + 5):  # one text with a whole chunk of padding
        mask = torch.stack([torch.arange(n) >= 0, torch.arange(n) >= first]).to(DEVICE)
        ours = steps(model.float(), ids, mask, new, by_kernels=True)
        baseline = steps(model, ids, mask, new, by_kernels=False)
        truth = steps(model.double(), ids, mask, new, by_kernels=False)
        assert_rule(ours, baseline, truth)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_as_it_is_loaded_has_kernels(name, dtype, tmp_path):
    model = model_of(name, tmp_path, dtype)
    assert cuda_step.unsupported_reason(model.tower, model.head, dtype) is None


@pytest.mark.parametrize("norm", [nn.LayerNorm(30, bias=False), nn.Identity()], ids=["without a bias", "of no kind"])
@pytest.mark.parametrize("place", ["last", "attention", "feed-forward"])
def test_norms_that_the_kernels_do_not_have_are_refused(norm, place, tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    assert cuda_step.unsupported_reason(model.tower, model.head, torch.float32) is None
    if place == "last":
        model.tower.norm = norm
    elif place == "attention":
        model.tower.blocks[1].attention_norm = norm
    else:
        model.tower.blocks[1].feed_forward_norm = norm
    why = cuda_step.unsupported_reason(model.tower, model.head, torch.float32)
    assert why is not None
    assert "LayerNorm" in why


class Beside(nn.Module):
    """An adapter that hands out the weights of the layer inside."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x):
        return self.inner(x) + 1


ADDED = {
    "an adapter": lambda block: setattr(block.attention, "w_o", Beside(block.attention.w_o)),
    "a patch": lambda block: setattr(block.feed_forward.w_out, "forward", lambda x: x),
    "a hook of a layer": lambda block: block.feed_forward.w_in.register_forward_hook(lambda *given: None),
    "a hook of a block": lambda block: block.register_forward_hook(lambda *given: None),
    "a hook before it": lambda block: block.attention.register_forward_pre_hook(lambda *given: None),
}


@pytest.mark.parametrize("what", ADDED)
def test_what_was_added_to_a_model_is_not_passed_over_by_its_kernels(what, tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    ADDED[what](model.tower.blocks[1])
    why = "somebody hooks into its layers, or has put others in their place, and the kernels call no layer"
    assert cuda_step.unsupported_reason(model.tower, model.head, torch.float32) == why


def test_weights_that_lie_otherwise_in_memory_are_refused(tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    layer = model.tower.blocks[1].attention.w_o
    layer.weight = nn.Parameter(layer.weight.detach().T.contiguous().T)  # the same numbers
    why = "the kernels read weights row after row, and some lie otherwise in memory"
    assert cuda_step.unsupported_reason(model.tower, model.head, torch.float32) == why


def test_a_backend_that_a_layer_asks_for_is_refused(tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    model.tower.blocks[1].attention.backend = "reference"
    why = "its attention asks for the backend 'reference'"
    assert cuda_step.unsupported_reason(model.tower, model.head, torch.float32) == why


@torch.no_grad()
@pytest.mark.parametrize("missing", [None, "triton is not installed"])
def test_a_step_is_captured_only_where_there_is_triton(missing, tmp_path, monkeypatch):
    model = model_of("LLaMA", tmp_path, torch.float32)
    ids, mask = prompt(1, 5, padded=False)
    _, state = model.begin(ids, mask, length=9)
    monkeypatch.setattr(cuda_graph, "no_triton", lambda: missing)
    monkeypatch.setattr(nn.Parameter, "device", torch.device("cuda", 0))
    assert can_capture(model.tower, model.head, state, torch.float32) == (missing is None)


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_norms_of_each_head_are_refused(name, tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    setattr(model.tower.blocks[1].attention, name, nn.RMSNorm(10))
    assert "norms" in cuda_step.unsupported_reason(model.tower, model.head, torch.float32)


def test_a_replay_sees_neither_who_watches_nor_autocast():
    def watcher(call, backend, output):
        pass

    assert not needs_eager_step()
    observe(watcher)
    try:
        assert needs_eager_step()
    finally:
        unobserve(watcher)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast would refuse it where there is no GPU
    try:
        assert needs_eager_step()
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["GPT-2", "LLaMA"])
def test_steps_under_autocast_are_not_captured_and_are_one_pass(name, tmp_path):
    model, (ids, _) = model_of(name, tmp_path, torch.float32), prompt(5, 11, padded=False)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        baseline = model(ids).logits[:, 6:]
        logits, state = model.begin(ids[:, :7], None, length=12)
        made = [logits.clone()] + [model.step(state, column).clone() for column in ids[:, 7:].T]
        assert state.captured is None
    with torch.no_grad():
        assert not can_capture(model.tower, model.head, state, model.dtype)  # its keys are halves
        assert_rule(torch.stack(made, 1), baseline, model.double()(ids).logits[:, 6:])


@torch.no_grad()
def test_steps_have_one_form_where_their_kernels_do(tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)

    def form(batch, room):
        ids, mask = prompt(batch, 5, padded=False)
        return cuda_step.StepBuffers.of(model.begin(ids, mask, length=room)[1], model.tower.rotary).form

    assert form(1, 9) == form(1, cuda_step.CHUNKS[0] - 1)
    assert form(1, 9) != form(1, 16)  # a room that 16 divides has loads of its own
    assert form(1, 9) != form(2, 9)
    assert form(1, 9) != form(1, cuda_step.CHUNKS[0] + 1)  # several chunks


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_captured_again_is_not_run_aside_and_gives_the_same(batch, tmp_path, monkeypatch):
    model = model_of("LLaMA", tmp_path, torch.float16)
    ids, mask = prompt(batch, 5, padded=batch > 1)
    made, ran = [], []
    step = cuda_step.step
    monkeypatch.setattr(cuda_step, "step", lambda *given: ran.append(1) or step(*given))
    for _ in range(3):
        made.append(generate(model, ids, mask, max_new_tokens=6, pad_token_id=0).ids)
    assert len(ran) == 4  # once aside, and once for each capture
    assert all(torch.equal(other, made[0]) for other in made)


def test_programs_take_more_keys_where_there_are_many():
    def split(rows, room):
        return cuda_step._split(torch.empty(1, rows, room, 2, device="meta"))

    assert split(8, 300) == (128, 3)
    assert split(8, 65_536) == (1024, 64)
    assert split(32, 16_384) == (1024, 16)
    assert split(1024, 65_537) == (2048, 33)


@pytest.mark.gpu
@torch.no_grad()
def test_generations_share_the_memory_of_their_graphs(tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    ids, _ = prompt(1, 11, padded=False)
    baseline, reserved = generate(model, ids, max_new_tokens=6, pad_token_id=0).ids, []
    for _ in range(4):
        assert torch.equal(generate(model, ids, max_new_tokens=6, pad_token_id=0).ids, baseline)
        reserved.append(torch.cuda.memory_reserved())
    assert len(set(reserved)) == 1
    states = [model.begin(ids, None, length=20)[1] for _ in range(2)]  # two that go on by turns
    turns = [[model.step(state, baseline[:, n]).clone() for state in states] for n in range(5)]
    assert states[0].captured.graph.pool() == states[1].captured.graph.pool()
    assert all(torch.equal(first, second) for first, second in turns)
    assert torch.equal(torch.cat([first.argmax(-1) for first, _ in turns]), baseline[0, 1:])


@pytest.mark.gpu
@torch.no_grad()
def test_a_step_on_another_stream_is_captured_there(tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    ids, _ = prompt(1, 11, padded=False)
    new = torch.randint(3, 29, (1, 4), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    _, state = model.begin(ids, None, length=20)
    made, graphs = [model.step(state, new[:, 0]).clone()], [state.captured.graph]
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        made += [model.step(state, column).clone() for column in new[:, 1:].T]
    torch.cuda.current_stream().wait_stream(other)
    assert state.captured.graph.pool() != graphs[0].pool()
    baseline = steps(model, ids, None, new, by_kernels=False)
    assert_rule(torch.stack(made), baseline, steps(model.double(), ids, None, new, by_kernels=False))


@pytest.mark.gpu
@torch.no_grad()
def test_captured_steps_of_one_wide_text_are_those_of_the_tower(tmp_path):
    """Wide enough that kernels overlap: what one read too early would not be the tower's."""
    config = LlamaConfig(
        vocab_size=1009, hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=2816, max_position_embeddings=700,
    )  # fmt: skip
    model = Twin("LlamaForCausalLM", config, tmp_path).ours(torch.float32).to(DEVICE)
    ids, _ = prompt(1, 300, padded=False)
    new = torch.randint(3, 1009, (1, 60), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    _, state = model.begin(ids, None, length=360)
    ours = torch.stack([model.step(state, column).clone() for column in new.T])
    assert state.captured is not None
    baseline = steps(model, ids, None, new, by_kernels=False)
    assert_rule(ours, baseline, steps(model.double(), ids, None, new, by_kernels=False))


@pytest.mark.gpu
@torch.no_grad()
def test_captured_steps_go_on_where_several_tokens_were_read_and_some_taken_back(tmp_path):
    model = model_of("LLaMA", tmp_path, torch.float32)
    ids, _ = prompt(1, 11, padded=False)
    new = torch.randint(3, 29, (1, 7), generator=torch.Generator().manual_seed(8)).to(DEVICE)
    _, state = model.begin(ids, None, length=24)
    made = [model.step(state, new[:, 0]).clone()[:, None]]
    model.extend(state, new[:, 3:])  # too early
    state.crop(12)
    made += [model.step(state, new[:, 1]).clone()[:, None], model.extend(state, new[:, 2:5])]
    made += [model.step(state, column).clone()[:, None] for column in new[:, 5:].T]
    assert state.captured is not None
    baseline = steps(model, ids, None, new, by_kernels=False)
    assert_rule(torch.cat(made, 1)[0], baseline[:, 0], steps(model.double(), ids, None, new, by_kernels=False)[:, 0])
