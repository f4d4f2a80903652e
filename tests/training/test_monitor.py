"""`regard.monitor` in loops that are not ours: which models it sees, when it warns, and that it changes nothing."""

import json
import warnings

import pytest
import torch
from torch import nn

import regard

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


class Block(nn.Module):
    """As in timm: attention and a feed-forward part, each after a norm."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(12), nn.LayerNorm(12)
        self.attn = nn.MultiheadAttention(12, heads, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(12, 12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 12))
        self.drop = nn.BatchNorm1d(5)  # a buffer that changes in training mode

    def forward(self, x):
        seen = self.norm1(x)
        x = x + self.attn(seen, seen, seen, need_weights=False)[0]
        return self.drop(x + self.mlp(self.norm2(x)))


class Unequal(nn.Module):
    """Blocks of 2, 3 and 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(heads) for heads in (2, 3, 4)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def unequal():
    torch.manual_seed(0)
    return Unequal(), {"x": torch.randn(3, 5, 12)}, lambda model, batch: model(**batch).square().mean()


def theirs():
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, n_positions=16, vocab_size=32)
    batch = {"input_ids": torch.arange(12).reshape(2, 6)}
    return (
        transformers.GPT2LMHeadModel(config),
        batch,
        lambda model, batch: model(**batch, labels=batch["input_ids"]).loss,
    )


def encoder_decoder():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
    model = regard.build("t5", **sizes)
    batch = {"input_ids": torch.arange(2, 8)[None], "labels": torch.arange(3, 7)[None]}
    return model, batch, lambda model, batch: model(**batch).loss


def vit():
    model = regard.build("vit", task="image-classification", image_size=16, patch_size=8, **SMALL)
    batch = {"pixel_values": torch.ones(2, 3, 16, 16), "labels": torch.tensor([0, 1])}
    return model, batch, lambda model, batch: model(**batch).loss


MODELS = {"nn.MultiheadAttention": (unequal, [2, 3, 4]), "transformers": (theirs, [2, 2]),
          "encoder-decoder": (encoder_decoder, [2] * 6), "ViT": (vit, [2, 2])}  # fmt: skip


def trained(make, *, watched: bool, steps: int = 4):
    """Weights, buffers and the next random number after some steps of a plain loop, and the monitor."""
    model, batch, loss = make()
    model.train()
    if isinstance(model, Unequal):
        model.blocks[0].mlp.eval()  # frozen by hand: flags are not all equal
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watching = regard.monitor(model, batch, every=2) if watched else None
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model, batch).backward()
        before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        if watching is not None:
            flags = [module.training for module in model.modules()]
            watching.step(step)
            assert flags == [module.training for module in model.modules()]
            after = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state | {"next": torch.rand(3)}, watching


@pytest.mark.parametrize("name", MODELS)
def test_models_of_every_kind_are_seen_and_no_bit_changes(name):
    make, heads = MODELS[name]
    plain, _ = trained(make, watched=False)
    state, watching = trained(make, watched=True)
    assert plain.keys() == state.keys()
    assert all(torch.equal(plain[key], state[key]) for key in plain)
    assert [record["step"] for record in watching.records] == [2, 4]
    for record in watching.records:
        for measure in ("entropy", "first_token", "max_logit", "output_norm"):
            assert [len(values) for values in record[measure]] == heads, measure
        assert all(0 <= value <= 1.000001 for values in record["entropy"] for value in values)
        assert all(0 < value < float("inf") for values in record["output_norm"] for value in values)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's own compiler
def test_compiled_blocks_are_seen():
    model, batch, loss = vit()
    from regard.nn.blocks import Block as OurBlock

    for block in [module for module in model.modules() if isinstance(module, OurBlock)]:
        block.compile(backend="eager")
    loss(model, batch).backward()
    watching = regard.monitor(model, batch, every=1)
    watching.step(1)
    assert [len(values) for values in watching.records[0]["entropy"]] == [2, 2]


def test_a_head_raises_its_alarm_once_until_it_recovers(tmp_path):
    model = regard.build("gpt2", n_embd=16, n_head=2, n_layer=1, n_positions=16, vocab_size=32)
    batch = {"input_ids": torch.arange(8)[None]}
    watching = regard.monitor(model, batch, every=1, out=tmp_path)
    watching.look(0)
    attention = model.get_submodule(watching.records[0]["layers"][0])
    before = {name: value.clone() for name, value in attention.state_dict().items()}

    def sharpen() -> None:
        with torch.no_grad():
            for parameter in attention.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(1000)

    steps = []
    for step in range(1, 7):
        if step in (2, 5):
            sharpen()
        if step == 4:
            attention.load_state_dict(before)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            alarms = watching.step(step)
        assert bool(caught) == bool(alarms)
        steps += [(alarm.step, alarm.head) for alarm in alarms]
    assert {step for step, _ in steps} == {2, 5}
    assert sorted(head for step, head in steps if step == 2) == sorted(head for step, head in steps if step == 5)
    assert [alarm.step for alarm in watching.alarms] == [step for step, _ in steps]
    assert sorted(path.name for path in tmp_path.glob("*.regard")) == [
        "alarm-step-00000002.regard", "alarm-step-00000005.regard"
    ]  # fmt: skip
    assert regard.open(tmp_path / "alarm-step-00000002.regard").names == watching.records[0]["layers"]
    lines = [json.loads(line) for line in (tmp_path / "monitor.jsonl").read_text().splitlines()]
    assert [bool(line["alarms"]) for line in lines] == [False, False, True, False, False, True, False]


@pytest.mark.parametrize("wrong", [{"every": 0}, {"every": 1, "entropy_floor": 2}, {"every": 1, "tensorboard": True}])
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=r"every|entropy_floor|out"):
        regard.monitor(nn.Linear(2, 2), {}, **wrong)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), {"src": torch.randn(2, 5, 12)}


def our_gpt2():
    torch.manual_seed(0)
    model = regard.build("gpt2", n_embd=16, n_head=2, n_layer=3, n_positions=16, vocab_size=32)
    return model, {"input_ids": torch.arange(14).reshape(2, 7)}


def padded(side: str):
    model, batch = our_gpt2()
    attention_mask = torch.ones(2, 7, dtype=torch.long)
    attention_mask[1, slice(0, 3) if side == "left" else slice(4, 7)] = 0
    return model, batch | {"attention_mask": attention_mask}


def padded_encoder():
    model, batch = encoder()
    return model, batch | {"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}


def large_logits():
    model, batch = our_gpt2()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attn" in name and parameter.ndim == 2:
                parameter.mul_(40)
    return model, batch


LOOKED_AT = {
    "GPT-2": our_gpt2,
    "GPT-2, padding left": lambda: padded("left"),
    "GPT-2, padding right": lambda: padded("right"),
    "GPT-2, large logits": large_logits,
    "nn.TransformerEncoder": encoder,
    "nn.TransformerEncoder, padding": padded_encoder,
    "transformers": lambda: theirs()[:2],
    "encoder-decoder": lambda: encoder_decoder()[:2],
}


@pytest.mark.parametrize("tiles", [False, True], ids=["whole", "tiles"])
@pytest.mark.parametrize("name", LOOKED_AT)
def test_values_are_those_of_a_full_watch(name, tiles, monkeypatch):
    model, batch = LOOKED_AT[name]()
    model.eval()
    if tiles:  # as for calls that are too large to compute as a whole
        monkeypatch.setattr("regard.training.monitor.AT_ONCE", 0)
    watching = regard.monitor(model, batch, every=1)
    for step in (1, 2, 3):  # the first look searches for calls, later ones know where they come from
        watching.step(step)
    with torch.no_grad(), regard.watch(model, keep="output", measures=["patterns", "max_logit"]) as seen:
        model(**batch)
    for record in watching.records:
        assert record["layers"] == seen.names
        for number, layer in enumerate(seen.names):
            view = seen[layer]
            expected = {
                "entropy": view.per_head("uniform").mean(0),
                "first_token": view.per_head("first").mean(0),
                "max_logit": view.max_logit.amax((0, 2)),
                "output_norm": view.output.norm(dim=-1).mean((0, 2)),
            }
            for measure, values in expected.items():
                # Records have 6 decimals; beyond, the order of sums.
                torch.testing.assert_close(torch.tensor(record[measure][number]), values, rtol=2e-6, atol=2e-6)


def test_a_look_leaves_nothing_installed():
    from torch.nn.attention import flex_attention

    from regard.lens.taps.calls import WATCHES
    from regard.op import observed

    function, fast_path = flex_attention.flex_attention, torch.backends.mha.get_fastpath_enabled()
    for make in (our_gpt2, encoder):
        model, batch = make()
        watching = regard.monitor(model, batch, every=1)
        for step in (1, 2):
            watching.step(step)
        model.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            watching.step(3)
        assert all(module.training for module in model.modules())
        assert not observed()
        assert not WATCHES
        assert flex_attention.flex_attention is function
        assert torch.backends.mha.get_fastpath_enabled() == fast_path
        assert torch.is_grad_enabled()


class Switch(nn.Module):
    """Our attention, then torch's, then FlexAttention, as `way` says."""

    way = "regard"

    def forward(self, x):
        from torch.nn.attention import flex_attention

        functions = {
            "regard": regard.attention,
            "sdpa": nn.functional.scaled_dot_product_attention,
            "flex": flex_attention.flex_attention,
        }
        return functions[self.way](x, x, x)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_changes_between_looks_is_found_again():
    model = nn.Sequential(Switch(), Switch())
    watching = regard.monitor(model, {"input": torch.randn(1, 2, 3, 4)}, every=1)
    for step, (way, count) in enumerate([("regard", 2), ("sdpa", 2), ("flex", 2), ("regard", 2), ("regard", 3)]):
        if count > len(model):
            model.append(Switch())
            model[2].way = "sdpa"
        for layer in model[:2]:
            layer.way = way
        for _ in range(2):
            watching.step(step)
            assert watching.records[-1]["layers"] == [str(n) for n in range(count)], way
    assert len({json.dumps(record["entropy"][:2]) for record in watching.records}) == 1


def test_a_look_waits_for_the_device_once():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.reads += function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
            return function(*args, **(kwargs or {}))

    model, batch = our_gpt2()
    model.eval()
    watching = regard.monitor(model, batch, every=1)
    watching.step(1)
    with torch.no_grad(), Count() as alone:
        model(**batch)
    with Count() as counted:
        watching.step(2)
    assert counted.reads == alone.reads  # the one transfer, of a list, is no such read
