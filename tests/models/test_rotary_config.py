"""Rotary settings of config.json, old and new, against what transformers makes of the same config.json."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from regard.models.families.llama import reach, rotary
from regard.models.family import Config
from regard.rotary import DynamicNTK, LinearScaling, Llama3, LongRope, Rotary, Yarn

DIM, MAX = 10, 67
LISTS = {"short_factor": [1.0, 1.1, 1.3, 1.2, 1.7], "long_factor": [1, 1.5, 2.5, 3.5, 4.5]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 0.2, "high_freq_factor": 1.5}
ORIGINAL = "original_max_position_embeddings"

# What a config says → the value it stands for.
KINDS = {
    "linear": ({"factor": 3.0}, LinearScaling(3.0)),
    "dynamic": ({"factor": 2}, DynamicNTK(2.0, original=MAX)),
    "yarn": ({"factor": 4.0}, Yarn(4.0, original=MAX)),
    "yarn, all of it": (
        {"factor": 4.0, ORIGINAL: 13, "beta_fast": 7.0, "beta_slow": 2, "attention_factor": 1.7, "truncate": False},
        Yarn(4.0, 13, beta_fast=7.0, beta_slow=2.0, attention_factor=1.7, truncate=False),
    ),
    "yarn, no factor": ({"factor": None, ORIGINAL: 13}, Yarn(MAX / 13, original=13)),
    "yarn, mscales": (
        {"factor": 4.0, ORIGINAL: 13, "mscale": 0.7, "mscale_all_dim": 1.3},
        Yarn(4.0, original=13, mscale=0.7, mscale_all_dim=1.3),
    ),
    "yarn, mscales beside attention_factor": (
        {"factor": 4.0, "attention_factor": 1.7, "mscale": 0.7, "mscale_all_dim": 1.3},
        Yarn(4.0, original=MAX, attention_factor=1.7),
    ),
    "yarn, one mscale": ({"factor": 4.0, "mscale": 0.7}, Yarn(4.0, original=MAX)),
    "yarn, the other mscale 0": ({"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0}, Yarn(4.0, original=MAX)),
    "yarn, betas 0": ({"factor": 4.0, "beta_fast": 0, "beta_slow": 0}, Yarn(4.0, original=MAX)),
    "llama3": ({**LLAMA3, ORIGINAL: 13}, Llama3(8.0, low=0.2, high=1.5, original=13)),
    "llama3, no original": (LLAMA3, Llama3(8.0, low=0.2, high=1.5, original=MAX)),
    "longrope": ({**LISTS, "factor": 3.0, ORIGINAL: 5}, LongRope(*LISTS.values(), original=5, factor=3.0)),
    "longrope, no factor": ({**LISTS, ORIGINAL: 5}, LongRope(*LISTS.values(), original=5, factor=MAX / 5)),
    "longrope, attention_factor": (
        {**LISTS, "factor": 3.0, "attention_factor": 1.9, ORIGINAL: 5},
        LongRope(*LISTS.values(), original=5, attention_factor=1.9),
    ),
}


def new(kind, given, **beside):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 53.0, **given}, **beside}


def old(kind, given, **beside):
    return {"rope_theta": 53.0, "rope_scaling": {"type": kind, **given}, **beside}


def read(values):
    return rotary(Config(values), DIM, max_positions=MAX)


@pytest.mark.parametrize("form", [new, old])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_read_in_the_old_form_and_the_new(name, form):
    given, scaling = KINDS[name]
    assert read(form(name.split(",")[0], given)) == Rotary(DIM, base=53.0, scaling=scaling)


@pytest.mark.parametrize("form", [new, old])
@pytest.mark.parametrize("name", KINDS)
def test_transformers_reads_the_same(name, form):
    values = form(name.split(",")[0], dict(KINDS[name][0]))
    config = LlamaConfig(hidden_size=40, num_attention_heads=4, max_position_embeddings=MAX, **values)
    module = LlamaRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1), torch.arange(MAX + 5)[None])
    ours = read(values).angles(torch.arange(MAX + 5))
    eps = 4 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(read(values).frequencies(MAX + 5), module.inv_freq, rtol=eps, atol=0)
    # An angle up to 72 turns one rounding step of it into an error of the cosine.
    for mine, theirs in ((ours.cos, cos), (ours.sin, sin)):
        torch.testing.assert_close(mine, theirs[0, :, : DIM // 2], rtol=0, atol=72 * eps)


def test_no_settings_are_the_plain_rotary():
    for values in ({}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_scaling": {"type": "default"}}):
        assert read(values) == Rotary(DIM, base=10000.0)


def test_the_base_is_read_inside_or_outside():
    assert read({"rope_theta": 53}).base == 53.0
    assert read({"rope_parameters": {"rope_theta": 53.0}}).base == 53.0
    assert read({"rope_theta": 53, "rope_parameters": {"rope_theta": 53.0}}).base == 53.0


def test_the_original_length_is_read_inside_or_outside():
    for form in (new, old):
        assert read(form("llama3", LLAMA3, **{ORIGINAL: 13})).scaling.original == 13


def test_both_names_may_say_the_same():
    assert read(old("linear", {"factor": 2.0, "rope_type": "linear"})).scaling == LinearScaling(2.0)
    both = {"type": "linear", "factor": 2.0}
    assert read({"rope_scaling": both, "rope_parameters": dict(both)}).scaling == LinearScaling(2.0)


def test_everything_is_read_so_that_nothing_is_left_to_refuse():
    for kind, given in (("linear", {"factor": 2.0}), ("llama3", LLAMA3)):
        beside = {"partial_rotary_factor": 1.0} | ({ORIGINAL: 13} if kind == "llama3" else {})
        config = Config(old(kind, given, **beside))
        rotary(config, DIM, max_positions=MAX)
        assert config.unused_keys() == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (old("mrope", {}), r"config\.json.*rope_scaling.*rope_type.*'mrope'.*default.*linear.*dynamic"),
        (
            old("linear", {"factor": 2.0, "beta_fast": 3, "a": 1}),
            r"rope_scaling.*rope_type.*'linear'.*beta_fast",
        ),
        (new("default", {"factor": 2.0}), r"rope_parameters.*rope_type.*'default'.*factor"),
        (new("dynamic", {"factor": 2.0, ORIGINAL: 13}), rf"rope_type.*'dynamic'.*{ORIGINAL}"),
        ({"rope_parameters": {"full_attention": {}}}, r"rope_type.*'default'.*full_attention"),
        ({"rope_scaling": {"type": 3}}, r"type.*3"),
        (new("linear", {}), r"config\.json.*rope_parameters.*factor"),
        (new("linear", {"factor": "2"}), r"factor.*'2'"),
        (
            new("linear", {"factor": -2.0}),
            r"config\.json.*rope_parameters.*factor.*0",
        ),
        (new("yarn", {"factor": 2.0, ORIGINAL: 8.5}), f"{ORIGINAL}"),
        (new("yarn", {"factor": 2.0, "truncate": 1}), r"truncate.*1"),
        (new("llama3", {"factor": 8.0, "low_freq_factor": 1.0}), "high_freq_factor"),
        (
            new("longrope", {"factor": 8.0, "short_factor": [1.0] * 5}),
            r"long_factor.*None",
        ),
        (new("longrope", {**LISTS, "short_factor": ["1"] * 5}), r"short_factor.*'1'"),
        (new("longrope", {**LISTS, "short_factor": [True] * 5}), r"short_factor.*True"),
        (
            new("longrope", {**LISTS, "short_factor": [1.0]}),
            r"config\.json.*rope_parameters.*LongRope.*5.*10",
        ),
        ({"rope_scaling": ["linear"]}, r"rope_scaling.*\['linear'\]"),
        ({"rope_parameters": 3}, r"rope_parameters.*3"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            r"rope_scaling.*rope_parameters",
        ),
        (
            old("linear", {"factor": 2.0, "rope_type": "dynamic"}),
            r"rope_type.*'dynamic'.*type.*'linear'",
        ),
        (new("linear", {"factor": 2.0}, rope_theta=7), r"rope_theta.*53.0.*7"),
        (old("llama3", {**LLAMA3, ORIGINAL: 13}, **{ORIGINAL: 7}), rf"{ORIGINAL}.*13.*7"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor.*0.5.*1.0"),
        (new("default", {"partial_rotary_factor": 0.5}), r"partial_rotary_factor.*0.5.*1.0"),
        ({"rope_theta": 1}, r"base.*1.*1.0"),
        ({"rope_theta": True}, r"rope_theta.*True"),
    ],
)
def test_what_is_not_understood_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        read(values)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 20),
        (LinearScaling(3.0), 60),
        (LinearScaling(0.5), 20),
        (DynamicNTK(2.5, original=20), 50),
        (Yarn(4.0, original=5), 20),  # max_position_embeddings is the length after
        (Yarn(4.0, original=20), 80),  # … or the length before
        (Llama3(8.0, low=1.0, high=4.0, original=13), 20),
        (LongRope(*LISTS.values(), original=5, factor=3.0), 20),
    ],
)
def test_reach_is_how_far_a_scaling_stretches(scaling, positions):
    assert reach(Rotary(DIM, scaling=scaling), 20) == positions
