"""`regard cost --compare`: what is counted, what is measured, the curves, and the command."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from regard import masks
from regard.cli import main
from regard.growth import (
    WAYS,
    GrowthSizes,
    Measured,
    growth,
    lengths_up_to,
    measure,
    measured_text,
    visible_links,
    words_in,
)
from regard.nn.feature_maps import kernel_attention, orthogonal_features
from regard.nn.linformer import SlotProjection
from regard.nn.projections import ContextKeys
from regard.tables import width
from regard.viz.figures import Curves, growth_curves

measured_growth = import_module("regard.growth")  # not the function, which regard gives for this name

# Every size is different, so that no two letters of a formula can be mistaken for each other.
SIZES = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 11, "batch": 3, "dtype": "float64"}
WAYS_SIZES = {"window": 4, "global_tokens": 2, "slots": 7, "features": 13}
LETTERS = {"n": 23, "H": 6, "Hkv": 2, "D": 11, "B": 3, "s": 8, "k": 7, "m": 13}
SMALL = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 4, "window": 3, "slots": 3, "features": 5}
COMMAND = ["cost", "--compare", "--n", "256", "--d-model", "24", "--num-heads", "3", "--lang", "en"]


def flops_of(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


# -------------------------------------------------------------------------------------------------------------- counted


@pytest.mark.parametrize("way", WAYS)
def test_every_number_is_what_its_formula_gives(way):
    count = growth([23], GrowthSizes(**SIZES, **WAYS_SIZES)).counts[way][23]
    for number in (count.flops, count.bytes):
        code = number.formula.replace("·", "*").replace("²", "**2")
        assert number == eval(code, {"links": lambda n: visible_links(n, 4, 2), **LETTERS})


def test_docstring_states_every_formula():
    counts = growth([23], GrowthSizes(**SIZES)).counts
    for way in WAYS:
        for number in (counts[way][23].flops, counts[way][23].bytes):
            assert f"| {number.formula} " in growth.__doc__


@pytest.mark.pairwise
@pytest.mark.parametrize("n", [1, 2, 5, 17, 31])
@pytest.mark.parametrize("window", [0, 1, 4, 40])
@pytest.mark.parametrize("global_tokens", [0, 1, 3, 40])
def test_visible_links_are_those_of_the_mask(n, window, global_tokens):
    mask = masks.window(window, window)
    if global_tokens:
        mask = mask | masks.globals(list(range(min(global_tokens, n))))
    assert visible_links(n, window, global_tokens) == int(mask.dense(n).sum())


def test_operations_of_low_rank_and_kernel_are_those_that_run():
    counts = growth([23], GrowthSizes(**SIZES, **WAYS_SIZES)).counts
    q, k, v = (torch.randn(3, heads, 23, 11) for heads in (6, 2, 2))
    directions = orthogonal_features(13, 11, seed=0).float()
    assert flops_of(lambda: kernel_attention(q, k, v, directions)) == counts["kernel"][23].flops
    projection = SlotProjection(23, 7)
    mixing = flops_of(lambda: projection(ContextKeys(k, v)))
    assert mixing + 4 * 3 * 6 * 23 * 7 * 11 == counts["low-rank"][23].flops


def test_only_full_attention_grows_as_the_square():
    counts = growth([2**14, 2**15], GrowthSizes(num_heads=12, num_kv_heads=12, head_dim=64)).counts
    steps = {way: counts[way][2**15].flops / counts[way][2**14].flops for way in WAYS}
    assert steps["full"] == 4
    assert steps["low-rank"] == steps["kernel"] == 2
    assert 2 < steps["sparse"] < 2.02


def test_lengths_double_up_to_the_longest():
    assert lengths_up_to(64 * 1024) == [1024 * 2**i for i in range(7)]
    assert lengths_up_to(3) == [1, 2, 3]
    assert lengths_up_to(100)[-1] == 100


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_text_has_every_number(lang):
    g = growth([23, 46], GrowthSizes(**SIZES, **WAYS_SIZES))
    text = g.text(lang)
    for way in WAYS:
        assert words_in(lang)[way] in text
        for n in (23, 46):
            for number in (g.counts[way][n].flops, g.counts[way][n].bytes):
                assert number.readable in text
                assert number.formula in text
    assert repr(g) == g.text("en")


def test_values_for_json_are_plain():
    g = growth([23, 46], GrowthSizes(**SIZES, **WAYS_SIZES))
    values = json.loads(json.dumps(g.as_dict()))
    assert values["lengths"] == [23, 46]
    assert values["sizes"] == SIZES | WAYS_SIZES
    assert values["counted"]["sparse"]["flops"]["values"] == [int(g.counts["sparse"][n].flops) for n in (23, 46)]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "growth"),
        ([0], {}, r"n.*1.*0"),
        ([5], {"slots": 0}, r"slots.*1.*0"),
        ([5], {"features": 0}, r"features.*1.*0"),
        ([5], {"window": -1}, r"window.*0.*-1"),
        ([5], {"num_kv_heads": 4}, r"num_kv_heads=4.*num_heads=6"),
        ([5], {"dtype": "int8"}, r"dtype.*float64"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(lengths, options, message):
    with pytest.raises(ValueError, match=message):
        growth(lengths, GrowthSizes(**(SIZES | options)))


@pytest.mark.parametrize(("lengths", "options"), [([5.0], {}), ([5], {"slots": 4.5}), ([5], {"features": "7"})])
def test_sizes_that_are_no_whole_numbers_are_refused(lengths, options):
    with pytest.raises(TypeError, match=r"(float|str)"):
        growth(lengths, GrowthSizes(**(SIZES | options)))


def test_lengths_and_languages_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"n.*1.*0"):
        lengths_up_to(0)
    with pytest.raises(ValueError, match=r"lang.*'en'.*'ko'.*'fr'"):
        growth([5], GrowthSizes(**SIZES)).text("fr")


# ------------------------------------------------------------------------------------------------------------- measured


def test_every_way_is_measured_at_every_length():
    results = list(measure(growth([64, 128], GrowthSizes(**SMALL))))
    assert [(m.way, m.n) for m in results] == [(way, n) for n in (64, 128) for way in WAYS]
    assert all(m.seconds > 0 and not m.reason for m in results)
    assert all(m.bytes is not None and m.bytes >= 0 for m in results)


def test_memory_that_a_pass_takes_is_counted_to_the_byte():
    def pass_of_two_steps():
        one = torch.ones(2**20)  # 4 MiB
        two = one + one  # 8 MiB held
        del one
        return two * two  # 8 MiB again: the first went

    assert measured_growth.peak_bytes(pass_of_two_steps, torch.device("cpu")) == 2**23
    assert measured_growth.peak_bytes(lambda: None, torch.device("cpu")) == 0


def test_profiler_says_nothing_on_the_terminal():
    code = "import torch; from regard.growth import peak_bytes; peak_bytes(list, torch.device('cpu'))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "profiler" not in ran.stdout + ran.stderr


def pretend(monkeypatch, seconds, held=0):
    """Measure nothing: a way takes so many seconds and bytes per n, or per n² where it is sparse."""

    def measured(way, n, z, device):
        power = n**2 if way == "sparse" else n
        return Measured(way=way, n=n, seconds=seconds * power, bytes=held * power)

    monkeypatch.setattr(measured_growth, "_measured", measured)


def test_pass_that_would_take_too_long_is_skipped_and_so_are_longer_ones(monkeypatch):
    pretend(monkeypatch, 1e-3)
    lengths = [512, 1024, 2048, 4096]
    results = {(m.way, m.n): m for m in measure(growth(lengths, GrowthSizes(**SMALL)), seconds=3.0)}
    # Full attention took 1.024 s at 1024, and four times as many operations make 4.1 s.
    assert results["full", 1024].seconds == pytest.approx(1.024)
    assert results["full", 2048].seconds is None
    assert re.search("4 s.*3 s", results["full", 2048].reason)
    assert re.search("2,048.*4 s.*3 s", results["full", 4096].reason)
    assert results["kernel", 2048].seconds == pytest.approx(2.048)
    assert results["kernel", 4096].seconds is None


def test_way_that_grows_faster_than_counted_is_stopped_by_its_own_growth(monkeypatch):
    pretend(monkeypatch, 1e-6)
    lengths = [512, 1024, 2048, 4096]
    results = {(m.way, m.n): m for m in measure(growth(lengths, GrowthSizes(**SMALL)), seconds=10.0)}
    assert results["sparse", 2048].seconds == pytest.approx(4.19, abs=0.01)
    assert results["sparse", 4096].seconds is None  # 16.8 s, though twice the operations would make 8.4 s


def test_pass_that_would_take_too_much_memory_is_skipped(monkeypatch):
    pretend(monkeypatch, 1e-9, held=2**20)
    monkeypatch.setattr(measured_growth, "_free", lambda device: 2.0**31)
    results = {(m.way, m.n): m for m in measure(growth([512, 1024], GrowthSizes(**SMALL)), fraction=0.4)}
    assert results["kernel", 512].bytes == 2**29
    assert re.search(r"1\.0 GiB.*0\.8 GiB", results["kernel", 1024].reason)


def test_memory_that_is_not_there_is_a_reason_and_another_error_is_not(monkeypatch):
    real = measured_growth._measured

    def short(way, n, z, device, message="not enough memory: you tried to allocate"):
        if n == 512 and way == "full":
            raise RuntimeError(message)
        return real(way, n, z, device)

    monkeypatch.setattr(measured_growth, "_measured", short)
    results = {(m.way, m.n): m for m in measure(growth([512], GrowthSizes(**SMALL)))}
    assert "memory" in results["full", 512].reason
    assert results["sparse", 512].seconds > 0
    monkeypatch.setattr(measured_growth, "_measured", lambda *given: short(*given, message="a bug"))
    with pytest.raises(RuntimeError, match="bug"):
        list(measure(growth([512], GrowthSizes(**SMALL))))


@pytest.mark.parametrize("device", ["nowhere", "cuda:99"])
def test_device_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"'{device}'"):
        next(measure(growth([5], GrowthSizes(**SMALL)), device=device))


def test_device_that_computes_nothing_is_refused():
    with pytest.raises(ValueError, match=r"'meta'.*CPU.*CUDA.*device"):
        next(measure(growth([5], GrowthSizes(**SMALL)), device="meta"))


def test_first_length_is_judged_too(monkeypatch):
    pretend(monkeypatch, 1e-3)
    results = list(measure(growth([2**20], GrowthSizes(**SMALL)), seconds=3.0))
    assert all(m.seconds is None for m in results)


@pytest.mark.parametrize(("lang", "skipped"), [("en", "skipped"), ("ko", "생략")])
def test_what_was_skipped_is_said_with_its_reason(lang, skipped):
    results = [Measured(way=way, n=5, seconds=None, bytes=None, reason="too long") for way in WAYS]
    text = measured_text((5,), results, lang)
    assert text.count(skipped) == 8
    assert text.count("n = 5: too long") == 4
    assert asdict(results[0]) == {"way": "full", "n": 5, "seconds": None, "bytes": None, "reason": "too long"}


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"fraction": 0.0}, {"fraction": 1.5}])
def test_limits_that_allow_nothing_are_refused(limits):
    with pytest.raises(ValueError, match=r"seconds.*0.*fraction.*0.*1\]"):
        next(measure(growth([5], GrowthSizes(**SMALL)), **limits))


# --------------------------------------------------------------------------------------------------------------- curves


def test_every_line_is_drawn_and_named_where_it_ends():
    panel = Curves("time", "s", {"full": [1.0, 4.0, None], "kernel": [2.0, 2.0, 4.0], "none": [None, None, None]})
    axes = growth_curves([1, 2, 4], [panel], title="cost").axes[0]
    assert [line.get_xydata().tolist() for line in axes.lines] == [[[1, 1], [2, 4]], [[1, 2], [2, 2], [4, 4]]]
    assert [(text.get_text(), text.xy[0]) for text in axes.texts] == [("full", 2), ("kernel", 4)]


def test_names_that_end_together_stand_apart():
    lines = {name: [1.0, 10.0] for name in ("a", "b", "c")}
    heights = [text.xy[1] for text in growth_curves([1, 2], [Curves("", "s", lines)]).axes[0].texts]
    assert heights[0] < heights[1] / 1.1 < heights[2] / 1.2


def test_name_of_a_line_that_ends_before_the_last_length_stands_to_its_left():
    lines = {"full": [1.0, 4.0, 16.0, 64.0, None], "kernel": [1.0, 2.0, 4.0, 8.0, 16.0]}
    texts = growth_curves([1, 2, 4, 8, 16], [Curves("", "s", lines)]).axes[0].texts
    assert [(text.get_text(), text.get_ha()) for text in texts] == [("full", "right"), ("kernel", "left")]


def test_line_that_hardly_grows_looks_like_it():
    axes = growth_curves([1, 2], [Curves("", "s", {"a": [1.0, 1.1]})], xlabel="tokens").axes[0]
    low, high = axes.get_ylim()
    assert high / low > 9.99
    assert axes.get_xlabel() == "tokens"


@pytest.mark.parametrize(
    ("lengths", "panels", "message"),
    [
        ([], [Curves("", "s", {})], r"0.*1"),
        ([1], [], r"1.*0"),
        ([1], [Curves("", "s", {str(i): [1.0] for i in range(5)})], r"4.*5"),
        ([1], [Curves("", "s", {"a": [1.0, 2.0]})], r"'a'.*2.*1"),
    ],
)
def test_curves_that_do_not_fit_are_refused(lengths, panels, message):
    with pytest.raises(ValueError, match=message):
        growth_curves(lengths, panels)


# ---------------------------------------------------------------------------------------------------------- the command


def test_command_prints_what_is_counted(capsys):
    assert main(COMMAND) == 0
    out = capsys.readouterr().out
    expected = growth(lengths_up_to(256), GrowthSizes(num_heads=3, num_kv_heads=3, head_dim=8)).text("en")
    assert [line for line in expected.split("\n") if line not in out.split("\n")] == []


def test_command_speaks_korean(capsys):
    assert main([*COMMAND[:-1], "ko"]) == 0
    assert "저랭크" in capsys.readouterr().out


@pytest.mark.parametrize("lang", ["en", "ko"])
def test_command_fits_a_terminal_of_eighty_columns(capsys, terminal, lang):
    terminal(80)
    assert main(["cost", "--compare", "--n", "65536", "--d-model", "768", "--num-heads", "12", "--lang", lang]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).split("\n")
    assert max(map(width, lines)) <= 80
    assert any(re.match(r"65,536 +13.19 TFLOP.*103.48 GFLOP$", line.rstrip()) for line in lines)  # a row on one line


def test_command_takes_every_size(capsys):
    sizes = ["--window", "4", "--global-tokens", "2", "--slots", "7", "--features", "13", "--batch", "3"]
    assert main([*COMMAND, *sizes, "--num-kv-heads", "1", "--dtype", "float64", "--json"]) == 0
    given = json.loads(capsys.readouterr().out)
    sizes = GrowthSizes(num_heads=3, num_kv_heads=1, head_dim=8, batch=3, dtype="float64", **WAYS_SIZES)
    expected = growth(lengths_up_to(256), sizes)
    assert given == expected.as_dict()


def test_command_measures_and_draws(capsys, tmp_path):
    figure = tmp_path / "new" / "plot.png"
    assert main([*COMMAND, "--measure", "--seconds", "2", "--device", "cpu", "--figure", str(figure), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert {m["way"] for m in measured} == set(WAYS)
    assert figure.read_bytes()[:4] == b"\x89PNG"
    assert main([*COMMAND, "--measure", "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "Measured time" in out
    assert f"Figure: {figure}" in out.replace("\n", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--figure", "plot.gif"], r"--figure.*'plot\.gif'.*\.png"),
        (["--seconds", "3"], "--seconds.*--measure"),
        (["--seconds", "3", "--device", "cpu"], "--device.*--seconds.*--measure"),
        (["--slots", "0"], "slots.*1.*0"),
        (["--measure", "--seconds", "0"], "seconds.*0"),
        (["--measure", "--device", "meta"], "'meta'.*CPU.*CUDA"),
        (["--kernel", "7"], "--compare.*--kernel\n"),
        (["--layers", "1"], "--compare.*--layers\n"),
        (["--layers", "9", "--kernel", "3"], "--kernel.*--layers\n"),
    ],
)
def test_wrong_option_is_told_in_one_line(capsys, options, message):
    assert main([*COMMAND, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)
    assert err.count("\n") == 1


def test_options_of_compare_alone_are_refused(capsys):
    assert main([part for part in COMMAND if part != "--compare"] + ["--slots", "4", "--measure"]) == 2
    assert re.search(r"--measure.*--slots.*--compare", capsys.readouterr().err)
    assert main([part for part in COMMAND if part != "--compare"] + ["--slots", "0"]) == 2
    assert re.search(r"--slots.*--compare", capsys.readouterr().err)


def test_interrupt_while_measuring_ends_quietly_and_leaves_no_figure(capsys, monkeypatch, tmp_path):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(measured_growth, "_measured", interrupted)
    assert main([*COMMAND, "--measure", "--figure", str(tmp_path / "plot.png")]) == 130
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []
