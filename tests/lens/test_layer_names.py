"""Module paths, many at once, in few words."""

import pytest

from regard.lens.doctor import merge_paths, stack_of


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        ([], ""),
        ([""], "(model)"),
        (["a"], "a"),
        (["a", "a"], "a"),
        (["layers.0.attn", "layers.1.attn", "layers.2.attn"], "layers.0–2.attn"),
        (["layers.2", "layers.0", "layers.1", "layers.5", "layers.9", "layers.10"], "layers.0–2,5,9–10"),
        (["h.0.attn", "h.0.cross", "h.1.attn", "h.1.cross"], "h.0–1.attn, h.0–1.cross"),
        (["stage.0.block.0", "stage.0.block.1", "stage.1.block.0"], "stage.0.block.0–1, stage.1.block.0"),
        (["encoder.0", "decoder.0"], "encoder.0, decoder.0"),
        (["layer1.attn", "layer2.attn"], "layer1.attn, layer2.attn"),
        (["0", "1"], "0–1"),
        (["a.²", "a.³"], "a.², a.³"),
    ],
)
def test_paths_that_differ_in_numbers_are_one(paths, text):
    assert merge_paths(paths) == text


def test_stack_is_the_path_without_numbers():
    assert stack_of("a.3.b.14") == stack_of("a.0.b.2") == ("a", "#", "b", "#")
    assert stack_of("layer1") == ("layer1",)
