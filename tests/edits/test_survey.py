"""A survey gives the statistics of what `watch` gives text by text, in the same bits however the work is divided."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import survey_worker
import torch
from ranks import run_ranks
from survey_worker import MEASURES, TEXTS, model, survey
from torch import nn

import regard
from regard import edits
from regard.edits.survey import HeadSums, Survey, SurveyInterrupted, student_t


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---------------------------------------------------------------------------------------------------------- the numbers


def test_mean_interval_and_count_are_those_of_the_texts_one_by_one():
    reader = model()
    measures = ("entropy", "first", "max_logit", "previous", "uniform", "same token", "induction")
    result = regard.survey(reader, TEXTS, measures, batch_size=3, shard=7)
    values: dict[str, list[torch.Tensor]] = {measure: [] for measure in measures}
    for text in TEXTS:
        ids = reader.tokenizer.batch([text]).input_ids
        words = [reader.tokenizer.tokens(ids[0])]
        with torch.no_grad(), regard.watch(reader, measures=["entropy", "max_logit", "patterns"], tokens=words) as seen:
            reader.eval()(ids)
        least = {"previous": len(text) > 1, "uniform": len(text) > 1}
        least |= dict.fromkeys(("same token", "induction"), len(set(text)) < len(text))
        for measure in measures:
            if least.get(measure, True):
                values[measure].append(seen.atlas(measure).double())
    assert result.texts == len(TEXTS)
    for measure, one in values.items():
        several, n = result[measure], len(one)
        assert several.count.unique().tolist() == [n]
        torch.testing.assert_close(several.mean, torch.stack(one).mean(0), rtol=1e-6, atol=1e-7)
        half = student_t(torch.tensor([n - 1.0]).double()) * torch.stack(one).std(0) / n**0.5
        torch.testing.assert_close(several.high, several.mean + half, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(several.low, several.mean - half, rtol=1e-5, atol=1e-6)
    assert len({len(one) for one in values.values()}) == 3  # all texts, those of two tokens, those with a token twice


def test_sums_of_shards_are_those_of_all_texts_also_far_from_zero():
    values = 1e6 + torch.randn(50, 2, 3, dtype=torch.float64)
    values[3:20, 1, 2] = torch.nan
    values[:10, 0, 0] = torch.nan  # no text of the first part counts
    merged = HeadSums.of(values[:10]).merge(HeadSums.of(values[10:13])).merge(HeadSums.of(values[13:]))
    for at in [(0, 0), (0, 1), (1, 2)]:
        seen = [x for x in values[:, *at].tolist() if x == x]
        assert int(merged.count[at]) == len(seen)
        assert float(merged.mean[at]) == pytest.approx(statistics.fmean(seen), rel=1e-14)
        assert float(merged.squares[at]) / (len(seen) - 1) == pytest.approx(statistics.variance(seen), rel=1e-8)


def test_quantile_of_student():
    tabled = {1: 12.7062, 2: 4.30265, 9: 2.26216, 10: 2.22814, 15: 2.13145, 40: 2.02108, 1000: 1.96234}
    torch.testing.assert_close(
        student_t(torch.tensor([float(n) for n in tabled])), torch.tensor(list(tabled.values())), rtol=0, atol=5e-5
    )


def test_measure_that_no_text_has_is_nan_and_counts_nothing():
    result = regard.survey(model(), ["abc", "def"], "induction")
    assert result.mean.isnan().all()
    assert result.count.sum() == 0
    assert result.top() == []
    assert "no text" in str(result)


def test_one_text_has_a_mean_and_no_interval():
    result = regard.survey(model(), ["abab"], "induction")
    assert result.mean.isfinite().all()
    assert result.low.isnan().all()


def test_strongest_heads_are_listed_with_interval_and_texts():
    result = regard.survey(model(), TEXTS, "previous", shard=9)
    heads = result.top(4)
    assert [head.mean for head in heads] == sorted(result.mean.flatten().tolist(), reverse=True)[:4]
    best = heads[0]
    assert best.name == result.names[best.layer]
    assert float(result.low[best.layer, best.head]) == best.low < best.mean < best.high
    line = str(result).splitlines()[5]
    assert line.split()[:3] == [str(best.layer), str(best.head), f"{best.mean:.4f}"]
    assert line.split()[-2:] == [str(best.count), best.name]


def test_heads_are_ablated_by_their_mean_over_a_corpus():
    reader = model().eval()
    result = regard.survey(reader, TEXTS, "output", batch_size=3)
    path, total = result.names[1], 0.0
    for text in TEXTS:  # by brute force
        with torch.no_grad(), regard.watch(reader, keep="output") as seen:
            reader(reader.tokenizer.batch([text]).input_ids)
        total = total + seen[path].output[0].double().mean(1)
    mean = (total / len(TEXTS))[:, None]  # (heads, 1, Dv)
    ids = reader.tokenizer.batch([TEXTS[0]]).input_ids
    single = edits.ablate(1, 0, by=result)
    assert "Survey" in repr(single)
    assert single == edits.ablate(1, 0, by=result)
    with torch.no_grad():
        plain = reader(ids).last_hidden_state
        with regard.edit(reader, edits.ablate(path, 0, by=mean[:1].float())):
            expected = reader(ids).last_hidden_state
        with regard.edit(reader, single):
            ablated = reader(ids).last_hidden_state
    torch.testing.assert_close(ablated, expected, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(ablated, plain, atol=1e-4)
    moved = regard.effect(lambda: reader(ids), reader, single, regard.metrics.moved(1))
    assert moved.value > 0
    assert len(moved.controls) == sum(len(heads) for heads in result.outputs.values()) - 1


def test_surveys_that_cannot_ablate_say_so():
    reader = model().eval()
    with pytest.raises(LookupError, match="output"):
        edits.ablate(0, 0, by=regard.survey(reader, TEXTS, "entropy"))
    with pytest.raises(TypeError, match="dict"):
        edits.ablate(0, 0, by={})
    result = regard.survey(reader, TEXTS, "output")
    first = {result.names[0]: result.output_sums[result.names[0]]}
    narrow = {name: total[:, :1] for name, total in result.output_sums.items()}
    ids = reader.tokenizer.batch([TEXTS[0]]).input_ids
    for sums, error, says in ((first, LookupError, result.names[0]), (narrow, ValueError, "1")):
        single = edits.ablate(1, 0, by=replace(result, output_sums=sums))
        with torch.no_grad(), pytest.raises(error, match=says), regard.edit(reader, single):
            reader(ids)


def test_mean_output_is_that_of_the_views():
    reader = model()
    result = regard.survey(reader, TEXTS, "output", batch_size=3, shard=7)
    expected = torch.zeros(3, 4, dtype=torch.float64)
    for text in TEXTS:
        with torch.no_grad(), regard.watch(reader, keep="output") as seen:
            reader.eval()(reader.tokenizer.batch([text]).input_ids)
        expected += seen[1].output[0].double().mean(1) / len(TEXTS)
    torch.testing.assert_close(result.outputs[result.names[1]], expected, rtol=1e-5, atol=1e-8)
    with pytest.raises(ValueError, match="output"):
        _ = result.mean


def test_one_of_several_measures_is_chosen_by_name():
    both = regard.survey(model(), TEXTS, ("entropy", "first"))
    assert torch.equal(both["first"].mean, regard.survey(model(), TEXTS, "first").mean)
    with pytest.raises(ValueError, match="entropy, first"):
        _ = both.mean
    with pytest.raises(KeyError, match="induction"):
        both["induction"]
    with pytest.raises(LookupError, match="output"):
        _ = both.outputs


def test_dropout_is_off_and_the_mode_of_the_model_comes_back():
    reader = model(embd_pdrop=0.5).train()
    first, second = (regard.survey(reader, TEXTS, "first").mean for _ in range(2))
    assert torch.equal(first, second)
    assert all(module.training for module in reader.modules())


# ----------------------------------------------------------------------------------------- processes and interruptions


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two processes made the survey, with a directory and without."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    folder = tmp_path_factory.mktemp("survey")
    run_ranks(survey_worker.main, folder)
    return folder


def test_two_processes_give_the_bits_of_one(two_processes, tmp_path):
    survey(tmp_path / "one")
    assert len(contents(tmp_path / "one")) == 2 + -(-len(TEXTS) // 4)  # shards, run.json and the result
    assert contents(tmp_path / "one") == contents(two_processes / "kept")
    result = (tmp_path / "one" / "survey.safetensors").read_bytes()
    assert [(two_processes / f"rank-{rank}.safetensors").read_bytes() for rank in range(2)] == [result, result]


def interrupt_after(calls: int, reader: nn.Module) -> list[int]:
    """Ctrl-C in the middle of a call of the model; the list grows by one for each call."""
    made: list[int] = []

    def hook(*_: object) -> None:
        made.append(len(made))
        if len(made) == calls:
            raise KeyboardInterrupt

    reader.register_forward_pre_hook(hook)
    return made


def test_interrupted_survey_goes_on_where_it_stopped_and_ends_in_the_same_bits(tmp_path):
    survey(tmp_path / "whole")
    interrupted, options = model(), {"out": tmp_path / "parts", "batch_size": 3, "shard": 4}
    interrupt_after(9, interrupted)
    with pytest.raises(SurveyInterrupted, match=str(tmp_path / "parts")) as stopped:
        regard.survey(interrupted, TEXTS, MEASURES, **options)
    kept = [name for name in contents(tmp_path / "parts") if name.startswith("shard")]
    assert 0 < stopped.value.done == 4 * len(kept) < stopped.value.total == len(TEXTS)

    resumed = model()
    made = interrupt_after(0, resumed)
    regard.survey(resumed, TEXTS, MEASURES, **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    before = len(made)
    again = regard.survey(resumed, TEXTS, MEASURES, **options)
    assert 0 < before == len(made)  # nothing is left to run
    assert torch.equal(again["entropy"].mean, Survey.open(tmp_path / "whole")["entropy"].mean)


def test_interrupted_survey_without_a_directory_says_that_nothing_is_kept():
    reader = model()
    interrupt_after(2, reader)
    with pytest.raises(KeyboardInterrupt, match="out="):
        regard.survey(reader, TEXTS)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"measure": "first"}, ["previous", "first"]),
        ({"batch_size": 5}, ["batch_size", "16", "5"]),
        ({"texts": [*TEXTS[:-1], "y"]}, ["data"]),
        ({"texts": TEXTS[:-1]}, ["25", "24"]),
        ({"length": 9}, ["length", "null", "9"]),
    ],
)
def test_directory_of_another_survey_is_refused_with_both_values(tmp_path, change, values):
    arguments = {"texts": TEXTS, "measure": "previous", "out": tmp_path}
    regard.survey(model(), **arguments)
    before = contents(tmp_path)
    with pytest.raises(FileExistsError) as refused:
        regard.survey(model(), **arguments | change)
    assert [value for value in values if value not in str(refused.value)] == []
    assert contents(tmp_path) == before


def test_directory_of_the_same_model_with_other_weights_is_refused(tmp_path):
    regard.survey(model(), TEXTS, out=tmp_path)
    other = model()
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    with pytest.raises(FileExistsError, match="weights"):
        regard.survey(other, TEXTS, out=tmp_path)


def test_damaged_shard_is_named(tmp_path):
    regard.survey(model(), TEXTS, out=tmp_path)
    shard = tmp_path / "shard-000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(ValueError, match=shard.name):
        regard.survey(model(), TEXTS, out=tmp_path)


# --------------------------------------------------------------------------------------------------- what can be given


def test_files_give_what_their_texts_give(tmp_path):
    lines, texts = "to be\n\nor not\r\nto bee\n", ["to be", "or not", "to bee"]
    (tmp_path / "a.txt").write_bytes(lines.encode())
    (tmp_path / "a.tsv").write_text("label\ttext\n" + "".join(f"1\t{text}\n" for text in texts))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    expected = regard.survey(model(), texts)
    for name in ("a.txt", "a.tsv", "a.jsonl"):
        result = regard.survey(model(), tmp_path / name)
        assert result.texts == 3
        assert torch.equal(result.mean, expected.mean), name
    assert torch.equal(
        regard.survey(model(), str(tmp_path / "a.txt"), limit=2).mean, regard.survey(model(), texts[:2]).mean
    )


class Padded(nn.Module):
    """Somebody else's model: embedding and one layer, with padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        padding = None if attention_mask is None else ~attention_mask.bool()
        return self.layer(self.embed(input_ids), src_key_padding_mask=padding)


@pytest.mark.parametrize("measure", ["entropy", "induction", "previous", "uniform", "same token"])
def test_padding_of_inputs_does_not_count(measure):
    rows = [[1, 2, 3, 1, 2], [4, 5, 6], [7, 7, 8, 9]]
    one_by_one = regard.survey(Padded(), [{"input_ids": torch.tensor([row])} for row in rows], measure)
    ids = torch.tensor([row + [0] * (5 - len(row)) for row in rows])
    batch = {"input_ids": ids, "attention_mask": (torch.arange(5) < torch.tensor([[5], [3], [4]])).long()}
    together = regard.survey(Padded(), [batch], measure)
    assert torch.equal(one_by_one.count, together.count)
    assert together.count[0].tolist() == [2 if measure in ("induction", "same token") else 3] * 2
    torch.testing.assert_close(one_by_one.mean, together.mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one_by_one.low, together.low, rtol=1e-4, atol=1e-5)


def test_padding_does_not_count_in_mean_outputs():
    single = regard.survey(Padded(), [{"input_ids": torch.tensor([[4, 5, 6]])}], "output")
    batch = {"input_ids": torch.tensor([[4, 5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    torch.testing.assert_close(regard.survey(Padded(), [batch], "output").outputs, single.outputs, rtol=1e-5, atol=1e-6)


def test_inputs_are_run_by_the_function_that_is_given():
    seen = []
    module = Padded()

    def run(inputs: dict[str, torch.Tensor]) -> None:
        seen.append(inputs["note"])
        module(inputs["input_ids"])

    items = ({"input_ids": torch.tensor([[1, 2, n]]), "note": n} for n in range(3))  # a generator
    result = regard.survey(module, items, "entropy", run=run)
    assert (seen, result.texts, result.count.tolist()) == ([0, 1, 2], 3, [[3, 3]])


def test_dataset_that_can_only_be_indexed_is_read_up_to_the_limit():
    class Indexed(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
            return {"input_ids": torch.tensor([[n, 1, 2]])}

    assert regard.survey(Padded(), Indexed(), "entropy").texts == 5
    assert regard.survey(Padded(), Indexed(), "entropy", limit=3).texts == 3


def test_layer_with_fewer_heads_has_nan_where_it_has_none():
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.MultiheadAttention(6, 3, batch_first=True)
            self.b = nn.MultiheadAttention(6, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(*[self.a(x, x, x)[0]] * 3)[0]

    result = regard.survey(Uneven(), [{"x": torch.randn(2, 4, 6)}], ("entropy", "output"))
    assert result["entropy"].count.tolist() == [[2, 2, 2], [2, 2, 0]]
    assert result["entropy"].mean.isnan().nonzero().tolist() == [[1, 2]]
    assert [tuple(mean.shape) for mean in result.outputs.values()] == [(3, 2), (2, 3)]
    assert len(result["entropy"].top(99)) == 5


# ------------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("texts", "options", "error", "values"),
    [
        ([], {}, ValueError, ["empty"]),
        (["a", " "], {}, ValueError, ["text 1", "empty"]),
        (["a", 3], {}, TypeError, ["text 1", "int"]),
        (["a"], {"measure": "depth"}, ValueError, ["'depth'", "induction", "entropy", "output"]),
        (["a"], {"measure": ()}, TypeError, ["induction"]),
        (["ab", "c" * 65], {}, ValueError, ["text 1", "65", "64", "length"]),
        (["a"], {"length": 65}, ValueError, ["65", "64"]),
        (["a"], {"batch_size": 0}, ValueError, ["batch_size", "0"]),
        (["a"], {"limit": True}, TypeError, ["limit", "True"]),
        (["a"], {"run": print}, ValueError, ["run"]),
        ("gone.txt", {}, FileNotFoundError, ["gone.txt"]),
        ("gone.bin", {}, ValueError, ["gone.bin", ".txt", ".jsonl"]),
        (5, {}, TypeError, ["int"]),
        ([{"input_ids": torch.ones(1, 2).long()}], {"length": 3}, ValueError, ["length", "3"]),
        ([{"input_ids": torch.ones(1, 2).long()}], {"measure": "delimiter"}, ValueError, ["delimiter"]),
        ([{"input_ids": torch.ones(1, 2).long()}, 3], {}, TypeError, ["input 1", "int"]),
    ],
)
def test_bad_input_is_refused(texts, options, error, values):
    with pytest.raises(error) as refused:
        regard.survey(model(), texts, **options)
    assert [value for value in values if value not in str(refused.value)] == []


def test_line_of_a_long_text_is_named_and_length_cuts_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(f"to be\n\n{'x' * 65}\n")
    with pytest.raises(ValueError, match=rf"{path.name}, line 3 .*65.*64"):
        regard.survey(model(), path)
    cut = regard.survey(model(), path, "entropy", length=64)
    assert torch.equal(cut.mean, regard.survey(model(), ["to be", "x" * 64], "entropy").mean)


def test_model_that_reads_no_texts_or_has_no_attention_is_refused():
    with pytest.raises(TypeError, match="Linear"):
        regard.survey(nn.Linear(3, 3), ["a"])
    with pytest.raises(LookupError, match="Linear"):
        regard.survey(nn.Linear(3, 3), [{"input": torch.ones(1, 3)}], "entropy")
    with pytest.raises(LookupError, match="tokens"):
        regard.survey(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [{"src": torch.ones(1, 3, 8)}])


def test_nan_is_an_error_that_names_text_and_layer():
    reader = model()

    def spoil(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output * torch.where(args[0] == ord("z"), torch.nan, 1.0)[..., None]

    reader.get_input_embeddings().register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match=r"text 2 .*entropy.*blocks\.0"):
        regard.survey(reader, ["ab", "cd", "ez", "gh"], "entropy")
