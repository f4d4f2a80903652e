"""Templates of weight names: which tensors of a checkpoint make which of ours, there and back."""

import pytest
import torch

from regard.models.family import Concat, Squeeze, Transpose, Unchanged, lookup

NAMES = {
    "tower.embed.tokens": "wte",
    "tower.blocks.{i}.attention.w_qkv": Concat("h.{i}.q", "h.{i}.k", "h.{i}.v"),
    "tower.blocks.{i}.feed_forward.w_in": Transpose("h.{i}.mlp.c_fc"),
    "tower.blocks.{i}.sinks": "h.{i}.sinks",
    "tower.blocks.0.relative.table": "h.0.first",
    "head.bias": "cls.bias",
    "head": "cls.decoder",
}


@pytest.mark.parametrize(
    ("parameter", "theirs"),
    [
        ("tower.embed.tokens.weight", ("wte.weight",)),
        ("tower.blocks.3.attention.w_qkv.weight", ("h.3.q.weight", "h.3.k.weight", "h.3.v.weight")),
        ("tower.blocks.12.attention.w_qkv.bias", ("h.12.q.bias", "h.12.k.bias", "h.12.v.bias")),
        ("tower.blocks.0.feed_forward.w_in.weight", ("h.0.mlp.c_fc.weight",)),
        ("tower.blocks.7.sinks", ("h.7.sinks",)),  # a template may name one parameter
        ("tower.blocks.0.relative.table.weight", ("h.0.first.weight",)),  # or a module of one layer alone
        ("head.bias", ("cls.bias",)),  # a parameter's own template comes before its module's
        ("head.weight", ("cls.decoder.weight",)),
    ],
)
def test_each_parameter_finds_its_tensors(parameter, theirs):
    source, index, leaf = lookup(NAMES, parameter)
    assert source.names(index, leaf) == theirs


@pytest.mark.parametrize(
    "parameter", ["tower.embed.norm.weight", "tower.blocks.1.relative.table.weight", "tower.tokens", "tokens.weight"]
)
def test_a_parameter_without_a_template_is_an_incomplete_family(parameter):
    with pytest.raises(KeyError, match=parameter):
        lookup(NAMES, parameter)


@pytest.mark.parametrize(
    ("source", "theirs", "rows", "ours"),
    [
        (Unchanged("a"), [(5, 3)], None, (5, 3)),
        (Transpose("a"), [(5, 3)], None, (3, 5)),
        (Transpose("a"), [(5,)], None, (5,)),  # a bias
        (Squeeze("a", optional=True), [(1, 7)], None, (7,)),
        (Squeeze("a", 2), [(1, 1, 7)], None, (7,)),
        (Concat("a", "b", "c"), [(5, 3), (2, 3), (2, 3)], (5, 2, 2), (9, 3)),
        (Concat("a", "b"), [(5,), (2,)], (5, 2), (7,)),
    ],
)
def test_shapes_join_and_split_agree_and_undo_each_other(source, theirs, rows, ours):
    parts = [torch.randn(shape) for shape in theirs]
    joined = source.join(parts)
    assert tuple(joined.shape) == ours
    assert source.shapes(ours, rows) == theirs
    again = source.split(joined, rows)
    assert len(again) == len(parts)
    for one, other in zip(again, parts, strict=True):
        assert torch.equal(one, other)
        assert one.is_contiguous()  # safetensors writes nothing else


def test_concat_keeps_the_order_of_its_parts():
    a, b = torch.ones(2, 3), torch.zeros(1, 3)
    assert torch.equal(Concat("a", "b").join([a, b]), torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))


def test_a_transposed_matrix_is_contiguous():
    stored = torch.arange(6.0).reshape(2, 3)
    ours = Transpose("a").join([stored])
    assert torch.equal(ours, stored.mT)
    assert ours.is_contiguous()


def test_only_an_optional_tensor_may_be_missing_from_a_checkpoint():
    sources = Unchanged("a"), Transpose("a"), Squeeze("a"), Concat("a"), Squeeze("a", optional=True)
    assert [source.optional for source in sources] == [False, False, False, False, True]
