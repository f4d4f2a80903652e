import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from math import ceil

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.costs import AttentionCost, Count, LayerCost, cost
from regard.tables import width

# Every size is different, so that no two letters of a formula can be mistaken for each other.
ODD = {"n": 13, "d_model": 7, "num_heads": 6, "num_kv_heads": 2, "head_dim": 11, "kernel": 5, "batch": 3, "layers": 17}
LETTERS = {"n": 13, "d": 7, "H": 6, "Hkv": 2, "D": 11, "k": 5, "B": 3, "L": 17, "s": 8}
LAYERS = ("attention", "rnn", "cnn")


def counts(layer: AttentionCost | LayerCost) -> dict[str, Count]:
    return {name: value for name, value in vars(layer).items() if isinstance(value, Count)}


def evaluated(formula: str) -> int:
    code = formula.replace("·", "*").replace("²", "**2").replace("−", "-").replace("⌈", "ceil(").replace("⌉", ")")
    return eval(code, {"ceil": ceil, "max": max, **LETTERS})


def flops_of(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def text_rows(lang: str) -> list[str]:
    return cost(**ODD, dtype="float64").text(lang).splitlines()


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("layer", LAYERS)
def test_every_number_is_what_its_formula_gives(layer):
    numbers = counts(getattr(cost(**ODD, dtype="float64"), layer))
    assert numbers == {name: evaluated(count.formula) for name, count in numbers.items()}


@pytest.mark.parametrize("layer", LAYERS)
def test_docstring_of_cost_states_every_formula(layer):
    documented = cost.__doc__
    numbers = counts(getattr(cost(**ODD), layer))
    derived = {"parameters_bytes", "one_head_flops"} | ({"flops"} if layer == "attention" else set())
    assert all(f"| {count.formula} " in documented for name, count in numbers.items() if name not in derived)


def test_attention_flops_are_those_that_torch_counts():
    q_size, kv_size = 6 * 11, 2 * 11
    x = torch.randn(3, 13, 7)
    q, k, v = (torch.nn.Linear(7, size) for size in (q_size, kv_size, kv_size))
    projections = flops_of(lambda: (q(x), k(x), v(x), functional.linear(torch.randn(3, 13, q_size), torch.ones(7, 66))))
    heads, weights = torch.randn(3, 6, 13, 11), torch.randn(3, 6, 13, 13)
    counted = cost(**ODD).attention
    assert counted.projections_flops == projections
    assert counted.scores_flops == flops_of(lambda: heads @ heads.mT)
    assert counted.weighted_sum_flops == flops_of(lambda: weights @ heads)
    assert counted.flops == counted.projections_flops + counted.scores_flops + counted.weighted_sum_flops


def test_recurrent_flops_are_those_that_torch_counts():
    cell, x, state = torch.nn.RNNCell(7, 7), torch.randn(3, 7), torch.randn(3, 7)

    def layer() -> None:
        for _ in range(13):
            cell(x, state)

    assert cost(**ODD).rnn.flops == flops_of(layer)


def test_convolution_flops_are_those_that_torch_counts():
    layer, x = torch.nn.Conv1d(7, 7, 5), torch.randn(3, 7, 13)
    assert cost(**ODD).cnn.flops == flops_of(lambda: layer(functional.pad(x, (4, 0))))


def test_parameters_are_those_of_the_torch_layers():
    def size(*modules: torch.nn.Module) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    counted = cost(**ODD)
    q, k, v, o = (torch.nn.Linear(*sizes) for sizes in ((7, 66), (7, 22), (7, 22), (66, 7)))
    assert counted.attention.parameters == size(q, k, v, o)
    assert counted.rnn.parameters == size(torch.nn.RNN(7, 7))
    assert counted.cnn.parameters == size(torch.nn.Conv1d(7, 7, 5))
    assert cost(1, 512, 8).attention.parameters == size(torch.nn.MultiheadAttention(512, 8)) == 1_050_624


def test_exercise_memory_for_d_model_512_and_d_k_64():
    assert cost(1000, 512, num_heads=8).sizes.head_dim == 64
    assert cost(1000, 512, num_heads=8).attention.parameters_bytes == 1_050_624 * 4
    assert cost(1000, 512, num_heads=1, head_dim=64).attention.parameters_bytes == 131_776 * 4


def test_exercise_weights_matrix_at_1000_positions():
    assert cost(1000, 512).attention.weights_bytes == 4_000_000
    assert cost(1000, 512, num_heads=8).attention.weights_bytes == 8 * 4_000_000


def test_bytes_of_every_array_are_those_of_the_tensors():
    counted = cost(**ODD, dtype="float64").attention
    s = regard.steps(*(torch.zeros(3, heads, 13, 11, dtype=torch.float64) for heads in (6, 2, 2)))
    for name, tensor in (("q", s.q), ("k", s.k), ("v", s.v), ("scores", s.scores), ("weights", s.weights)):
        assert getattr(counted, f"{name}_bytes") == tensor.nbytes
    assert counted.weights_shape == s.weights.shape


def test_bytes_and_shape_of_the_weights_are_printed():
    rows = [re.split(r" {2,}", line) for line in cost(1000, 512, 8).text().splitlines()]
    for name, exact, readable in (("Q", "2,048,000 B", "1.95 MiB"), ("scores QKᵀ", "32,000,000 B", "30.52 MiB")):
        assert [f"{name} in bytes", "attention", exact, readable] in [row[:4] for row in rows]
    assert ["· its shape", "attention", "(1, 8, 1000, 1000)", "(B, H, n, n)"] in rows


def test_heads_that_share_d_model_cost_what_one_head_costs():
    flops = {cost(13, 30, heads).attention.flops for heads in (1, 2, 3, 5, 6, 10, 15, 30)}
    assert flops == {cost(13, 30, 6).attention.one_head_flops}


def test_heads_of_a_fixed_size_do_cost_more():
    counted = cost(13, 30, 6, head_dim=30).attention
    assert counted.flops == 6 * counted.one_head_flops


def test_key_value_heads_default_to_query_heads():
    assert cost(13, 30, 6) == cost(13, 30, 6, num_kv_heads=6, head_dim=5)


@pytest.mark.parametrize(("kv_heads", "share"), [(6, 1), (3, 2), (2, 3), (1, 6)])
def test_fewer_key_value_heads_shrink_the_cache_in_proportion(kv_heads, share):
    assert cost(13, 30, 6, num_kv_heads=kv_heads).attention.cache_bytes * share == cost(13, 30, 6).attention.cache_bytes


def test_layers_count_in_the_cache_and_nowhere_else():
    one, many = cost(13, 30, 6), cost(13, 30, 6, layers=17)
    for layer in LAYERS:
        before, after = counts(getattr(one, layer)), counts(getattr(many, layer))
        assert {name for name in before if before[name] != after[name]} == {"cache_bytes"}
        assert after["cache_bytes"] == 17 * before["cache_bytes"]


@pytest.mark.parametrize(("n", "kernel"), [(1, 3), (2, 2), (5, 2), (13, 3), (13, 5), (14, 5), (3, 7)])
def test_longest_path_of_a_convolution_is_the_stack_that_joins_first_and_last(n, kernel):
    reached, layers = {0}, 0  # outputs that depend on input 0
    while layers == 0 or n - 1 not in reached:
        reached = {i + step for i in reached for step in range(kernel)}
        layers += 1
    assert cost(n, 7, kernel=kernel).cnn.longest_path == layers


def test_steps_and_paths_of_attention_and_recurrence():
    counted = cost(**ODD)
    assert (counted.attention.sequential_steps, counted.attention.longest_path) == (1, 1)
    assert (counted.rnn.sequential_steps, counted.rnn.longest_path) == (13, 13)
    assert counted.cnn.sequential_steps == 1


def test_orders_are_those_of_the_source_documents():
    counted = cost(**ODD)
    assert [getattr(counted, layer).order for layer in LAYERS] == ["O(n²·d)", "O(n·d²)", "O(k·n·d²)"]


@pytest.mark.parametrize(
    ("name", "size"), [("float64", 8), ("float32", 4), ("bfloat16", 2), ("float16", 2), ("int8", None)]
)
def test_dtype_sets_the_bytes_by_name_or_by_torch_dtype(name, size):
    for dtype in (name, getattr(torch, name)):
        if size is None:
            with pytest.raises(ValueError, match=r"dtype.*float64.*float32.*bfloat16.*float16.*int8"):
                cost(13, 30, dtype=dtype)
        else:
            assert cost(13, 30, dtype=dtype).attention.weights_bytes == 13 * 13 * size
            assert cost(13, 30, dtype=dtype).sizes.dtype == name


# -------------------------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("value", "unit", "readable"),
    [
        (1023, "B", ""),
        (1024, "B", "1.00 KiB"),
        (8_000_000, "B", "7.63 MiB"),
        (1024**2 - 1, "B", "1.00 MiB"),
        (1024**2 - 6, "B", "1,023.99 KiB"),
        (999, "FLOP", ""),
        (1_000, "FLOP", "1.00 kFLOP"),
        (4_145_152_000, "FLOP", "4.15 GFLOP"),
        (999_995_000, "FLOP", "1.00 GFLOP"),
        (10**400, "FLOP", f"{10**382:,}.00 EFLOP"),
        (5_000_000, "", ""),
    ],
)
def test_readable_rounds_to_two_decimals_of_the_right_prefix(value, unit, readable):
    assert Count(value, "n", unit).readable == readable


def test_exact_shows_every_digit_and_the_unit():
    assert Count(8_000_000, "n", "B").exact == "8,000,000 B"
    assert Count(8_000_000, "n").exact == "8,000,000"


def test_count_survives_a_copy_with_its_formula():
    copied = copy.deepcopy(Count(7, "n·d", "B"))
    assert (copied, copied.formula, copied.unit) == (7, "n·d", "B")


# --------------------------------------------------------------------------------------------------------------- print


def test_table_puts_each_number_beside_its_formula():
    lines = text_rows("en")
    counted = cost(**ODD, dtype="float64")
    for name, layer in (("attention", counted.attention), ("RNN", counted.rnn), ("CNN", counted.cnn)):
        for count in counts(layer).values():
            wanted = [name, *count.exact.split(), *count.readable.split(), *count.formula.split()]
            assert any(line.split()[-len(wanted) :] == wanted for line in lines), wanted


def test_table_opens_with_the_sizes():
    assert text_rows("en")[0] == (
        "n = 13 positions, d = 7 (d_model), H = 6 heads of D = 11, Hkv = 2 key/value heads, k = 5 (kernel), "
        "B = 3 (batch), L = 17 (layers), s = 8 bytes (float64)"
    )


def test_korean_table_has_the_same_numbers_under_korean_names():
    english, korean = text_rows("en"), text_rows("ko")
    assert len(english) == len(korean)
    assert korean[1].split() == ["항목", "레이어", "정확한", "값", "환산", "계산식"]
    assert any(line.startswith("시간 복잡도") and line.endswith("O(n²·d)") for line in korean)
    names = {"attention": "어텐션", "RNN": "RNN", "CNN": "CNN"}
    for en, ko in zip(english[3:-1], korean[3:-1], strict=True):
        layer = next(name for name in names if f" {name} " in en)
        label, _, numbers = ko.rpartition(f" {names[layer]} ")
        assert numbers.split() == en.split(f" {layer} ")[1].split()
        assert bool(re.search("[가-힣]", label)) == bool(en.split(f" {layer} ")[0].strip())


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_columns_line_up(lang):
    lines = text_rows(lang)[1:-1]
    layer = width(lines[0].split("layer" if lang == "en" else "레이어")[0])
    starts = {width(line[: line.index(name)]) for line in lines for name in (" RNN ", " CNN ") if name in line}
    assert starts == {layer - 1}


def test_unknown_language_is_refused():
    with pytest.raises(ValueError, match=r"lang.*'en'.*'ko'.*'fr'"):
        cost(13, 7).text("fr")


def test_str_and_repr_are_the_english_table():
    counted = cost(**ODD)
    assert str(counted) == repr(counted) == counted.text() == counted.text("en")
    assert counted.text("ko") != counted.text("en")


def test_html_has_a_cell_for_every_number_and_formula():
    counted = cost(**ODD)
    page = counted._repr_html_()
    for layer in LAYERS:
        for count in counts(getattr(counted, layer)).values():
            assert f'<td style="text-align:right">{count.exact}</td>' in page
            assert f"<td>{count.formula}</td>" in page
    assert "<p>n = 13 positions" in page


def test_as_dict_is_json_with_the_attributes_and_their_formulas():
    counted = cost(**ODD, dtype=torch.float64)
    plain = json.loads(json.dumps(counted.as_dict()))
    assert plain["attention"].pop("weights_shape") == [3, 6, 13, 13]
    assert plain["sizes"] == {**ODD, "dtype": "float64"}
    for layer in LAYERS:
        numbers = counts(getattr(counted, layer))
        formulas = plain[layer].pop("formulas")
        assert formulas == {name: count.formula for name, count in numbers.items()}
        assert plain[layer] == {"order": getattr(counted, layer).order, **numbers}


def test_as_dict_holds_plain_ints():
    assert type(cost(13, 7).as_dict()["rnn"]["flops"]) is int


def test_result_is_frozen():
    with pytest.raises(FrozenInstanceError):
        cost(13, 7).attention.flops = Count(0)


def test_costs_need_no_torch_and_no_numpy():
    code = "import sys, regard; regard.cost(13, 7).text('ko'); print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_cost_is_public():
    assert regard.cost is cost


# -------------------------------------------------------------------------------------------------------------- errors

SIZES = ["n", "d_model", "num_heads", "num_kv_heads", "head_dim", "kernel", "batch", "layers"]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_below_one_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"{name}.*{2 if name == 'kernel' else 1}.*{value}"):
        cost(**{**ODD, name: value})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [2.0, "2", True, [2]])
def test_sizes_that_are_not_whole_numbers_are_refused(name, value):
    with pytest.raises(TypeError, match=rf"{name}.*{type(value).__name__}"):
        cost(**{**ODD, name: value})


def test_numpy_integers_are_whole_numbers():
    assert cost(np.int64(13), np.int32(30), np.uint8(6)) == cost(13, 30, 6)


def test_large_numpy_integers_do_not_overflow():
    assert cost(np.int32(100_000), 512).attention.weights_bytes == 40_000_000_000


def test_heads_that_do_not_divide_d_model_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"d_model=512.*heads=7.*head_dim=…"):
        cost(1000, 512, 7)


def test_heads_need_not_divide_d_model_when_their_size_is_given():
    assert cost(1000, 512, 7, head_dim=64).sizes.head_dim == 64


@pytest.mark.parametrize("kv_heads", [4, 12])
def test_key_value_heads_that_do_not_divide_heads_are_refused_with_both_numbers(kv_heads):
    with pytest.raises(ValueError, match=rf"kv_heads.*num_kv_heads={kv_heads}.*heads=6"):
        cost(13, 30, 6, num_kv_heads=kv_heads)


def test_convolution_of_width_one_is_refused():
    with pytest.raises(ValueError, match=r"kernel.*2.*1"):
        cost(13, 7, kernel=1)
