"""`regard effect`: what a link, a head or a layer does to an answer; `regard survey`: all heads over many texts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cached_property
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard import tables
from regard.cli.captures import effect_json
from regard.cli.commands import EffectOptions, SurveyOptions
from regard.cli.inputs import chosen_layer, find_token, load_model, read_one, refuse, refuse_images
from regard.cli.look import read_text
from regard.cli.outputs import Terminal, bar, print_json
from regard.session.labels import shown, spelled

if TYPE_CHECKING:
    from torch import Tensor

    from regard.edits.metrics import Metric
    from regard.edits.survey import Survey
    from regard.edits.values import Edit
    from regard.models.model import Model
    from regard.models.outputs import ModelOutput
    from regard.session.heads import Layer
    from regard.session.session import Session

VERSION = 1
EDITS = ("knock-out", "ablate", "zero-values")
SCANS = ("heads", "layers", "edges")
METHODS = ("exact", "gradient")
METRICS = "moved, kl, 'logit: A - B' or 'log-prob: A'"
VOCABULARY_TASKS = ("fill-mask", "pretraining", "text-generation", "text2text-generation")
CONTROLS, TOP = 20, 10
KL = "KL"
CAVEAT = (
    "A knock-out takes the model where it was never trained: a large effect says that the model uses this link as it "
    "is, not what it would have learnt without it."
)
CAVEAT_OF_HEADS = (
    "An edit takes the model where it was never trained: a large effect says that the model uses this as it is, not "
    "what it would have learnt without it."
)
INTERRUPTED = 130


def effect(options: EffectOptions) -> None:
    """Print what one edit does, or a table of what it does in every head, or of a scan."""
    check_options(options)
    refuse_images([] if options.text is None else [options.text], "regard effect")
    session, _ = read_text(read_one(options.text, options.file), options)
    place = EditPlace(session, options)
    metric = read_metric(place, options)
    if options.scan is not None:
        show_scan(place, metric, options)
    elif options.head is None:
        show_heads(place, metric, options)
    else:
        show_effect(place, metric, options)


def check_options(options: EffectOptions) -> None:
    """Raise ValueError for what is wrong with the options alone."""
    for name, known in (("edit", EDITS), ("scan", SCANS), ("method", METHODS)):
        value = getattr(options, name)
        if value is not None and value not in known:
            raise ValueError(f"--{name} must be {', '.join(known[:-1])} or {known[-1]}; got {value!r}")
    for name, least in (("controls", 0), ("top", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    kind, _ = split_metric(options.metric)
    edit = options.edit or "knock-out"
    if options.scan is not None:
        of_one = ("edit", "to", "layer", "head", "controls", "seed")
        refuse(options, of_one, "not for --scan, which edits one place after another")
        needed: tuple[str, ...] = ("token",) if options.scan == "edges" or kind == "moved" else ()
        what = "--scan edges" if options.scan == "edges" else "--metric moved"
    else:
        refuse(options, ("method",), "for --scan")
        if options.head is None:
            refuse(options, ("controls", "seed"), "for one edit: give --layer and --head")
        else:
            refuse(options, ("top",), "for tables")
        if edit == "ablate":
            refuse(options, ("to",), "for knock-out and zero-values; ablate takes the head's whole output")
        link = {"knock-out": ("token", "to"), "zero-values": ("to",), "ablate": ()}[edit]
        needed, what = link, f"--edit {edit}"
        if kind == "moved" and "token" not in needed and all(getattr(options, name) is not None for name in needed):
            needed, what = ("token",), "--metric moved"
    missing = [f"--{name}" for name in needed if getattr(options, name) is None]
    if missing:
        other = "" if options.scan or edit != "knock-out" else "; or scan all heads with --scan heads"
        raise ValueError(f"{what} needs {' and '.join(missing)}, a word of the text or the number of a token{other}")
    if options.method == "gradient" and kind in ("moved", "kl"):
        raise ValueError(
            f"--method gradient cannot measure {kind!r}, which compares with the unedited run and has no gradient "
            "there: use --method exact, or --metric 'logit: A - B' or 'log-prob: A'"
        )


def split_metric(text: str) -> tuple[str, list[str]]:
    """The kind of a metric and its words. Raises ValueError if it is none."""
    kind, colon, words = (part.strip() for part in text.partition(":"))
    if kind in ("moved", "kl") and not colon:
        return kind, []
    names = [word.strip() for word in words.split(" - ")]
    if all(names) and len(names) == {"logit": 2, "log-prob": 1}.get(kind):
        return kind, names
    raise ValueError(f"--metric must be {METRICS}; got {text!r}")


# --------------------------------------------------------------------------------------------------------------- places


class EditPlace:
    """Where a text is edited: its tokens, layers and heads, checked before anything is edited."""

    def __init__(self, session: Session, options: EffectOptions) -> None:
        from regard.session.effects import check_single_runs

        assert session.model is not None
        self.session, self.model, self.head = session, session.model, options.head
        self.edit = options.edit or "knock-out"
        self.token = self._one(options.token, "--token")
        self.to = self._one(options.to, "--to")
        layer = chosen_layer(session, options)
        check_single_runs(session)
        self.layers = list(session.layers) if layer is None else [layer]
        if options.scan is None and self.edit != "ablate":
            self._check_link(layer)

    def _one(self, wanted: str | None, name: str) -> range:
        """The tokens of a word; an empty range without one."""
        if wanted is None:
            return range(0)
        runs = find_token(self.session.tokens, wanted, name)
        if len(runs) > 1:
            starts = ", ".join(str(run.start) for run in runs)
            raise ValueError(
                f"{name} {wanted!r} is in the text {len(runs)} times: give the number of a token, one of {starts}"
            )
        return runs[0]

    def _check_link(self, layer: Layer | None) -> None:
        """Raise LookupError where a layer does not read this text, ValueError where masks hide the link everywhere."""
        self.layers = [layer for layer in self.layers if layer.start is not None]
        if not self.layers:
            where = "every layer" if layer is None else f"layer {layer.index}"
            raise LookupError(
                f"the queries and keys of {where} are not the tokens of this text: there is no link to edit"
            )
        if self.edit != "knock-out":
            return
        heads = slice(None) if self.head is None else slice(self.head, self.head + 1)
        if all(float(self.weights(layer)[heads].max()) == 0 for layer in self.layers):
            raise ValueError(
                f"the mask hides --to {self.word(self.to)!r} (token {self.to.start}) from --token "
                f"{self.word(self.token)!r} (token {self.token.start}), so there is no link to knock out"
            )

    def weights(self, layer: Layer) -> Tensor:
        """What --token gives to --to in each head of a layer, (H,): as `Effect.weight`, a mean over its pieces."""
        import torch

        assert layer.start is not None
        rows = [torch.as_tensor(layer.view.row(query - layer.start))[0] for query in self.token]  # (H, Nk) each
        return torch.stack(rows)[..., list(self.to)].sum(-1).mean(0)

    def word(self, tokens: range) -> str:
        """A word as it is printed."""
        return shown(spelled([self.session.tokens[at] for at in tokens]))

    def edit_of(self, layer: Layer, head: int) -> Edit:
        """The edit in a head."""
        from regard.edits import values as edits

        if self.edit == "ablate":
            return edits.ablate(layer.index, head)
        keys = _positions(self.to)
        if self.edit == "zero-values":
            return edits.zero_values(layer.index, head, keys)
        return edits.knock_out(layer.index, head, _positions(self.token), keys)

    def run(self) -> ModelOutput:
        """The model's output for the text."""
        from regard.session.session import read_ids

        return read_ids(self.model, self.ids)

    @cached_property
    def ids(self) -> Tensor:
        """Token ids, (1, N), cut where the session was."""
        tokenizer, text, count = self.model.tokenizer, self.session.text or "", len(self.session.tokens)
        ids = tokenizer.batch([text]).input_ids
        return ids if ids.shape[1] == count else tokenizer.batch([text], length=count, truncate=True).input_ids

    @cached_property
    def plain(self) -> ModelOutput:
        """The output without an edit."""
        import torch

        with torch.no_grad():
            return self.run()


def _positions(tokens: range) -> int | list[int]:
    return tokens.start if len(tokens) == 1 else list(tokens)


# --------------------------------------------------------------------------------------------------------------- metric


def read_metric(place: EditPlace, options: EffectOptions) -> Metric:
    """The metric of --metric. Raises ValueError for one that the model or its tokenizer does not have."""
    from regard.edits import metrics
    from regard.session.effects import moved_metric

    kind, names = split_metric(options.metric)
    if kind == "moved":
        name = options.say("vector of “{token}”", token=place.word(place.token))
        return moved_metric(place.session.layers[0], place.token, name)
    model = place.model
    if place.plain.logits is None or model.task not in (*VOCABULARY_TASKS, "text-classification"):
        raise ValueError(
            f"--metric {kind} needs the logits of a language model or a text classifier, and {model.family.title} has "
            f"the task {model.task!r} here: use --metric moved, or another --model"
        )
    position = predicted_position(place) if model.task in VOCABULARY_TASKS else -1
    if kind == "kl":
        return metrics.Metric(KL, metrics.kl(position=position).function, relative=True)
    if model.task in VOCABULARY_TASKS:
        numbers = [word_id(name, place) for name in names]
        words = [model.tokenizer.tokens([number])[0] for number in numbers]
    else:
        words = list(model.config.labels(place.plain.logits.shape[-1]))
        unknown = [name for name in names if name not in words]
        if unknown:
            raise ValueError(f"--metric: there is no label {unknown[0]!r}; there are {', '.join(words)}")
        numbers, words = [words.index(name) for name in names], names
    if kind == "logit":
        function = metrics.logit_diff(numbers[0], numbers[1], position=position).function
        name = options.say("logit {a} − logit {b}", a=f"“{words[0]}”", b=f"“{words[1]}”")
        return metrics.Metric(name, function)
    return metrics.Metric(f"log p(“{words[0]}”)", metrics.log_prob(numbers[0], position=position).function)


def predicted_position(place: EditPlace) -> int:
    """Where a language model predicts: at the mask token of the text, else after its last token."""
    mask = place.model.tokenizer.ids_of.mask
    if place.model.task not in ("fill-mask", "pretraining") or mask is None:
        return -1
    places = (place.ids[0] == mask).nonzero().view(-1).tolist()
    if len(places) != 1:
        name = place.model.tokenizer.tokens([mask])[0]
        raise ValueError(
            f"{place.model.family.title} predicts the word at {name}, and the text has {len(places)} of them: write "
            "one where the word is missing"
        )
    return int(places[0])


def word_id(word: str, place: EditPlace) -> int:
    """The token of a word, with or without a space before it; the one that fits the end of the text wins."""
    tokenizer = place.model.tokenizer
    spellings = [f" {word}", word]
    if (place.session.text or "")[-1:].isspace():
        spellings.reverse()
    encoded = [tokenizer.encode(spelling, special=False).ids for spelling in spellings]
    known = [ids[0] for ids in encoded if len(ids) == 1 and ids[0] != tokenizer.ids_of.unk]
    if known:
        return int(known[0])
    pieces = min(encoded, key=len)
    if len(pieces) < 2:
        raise ValueError(f"--metric: {word!r} is not in the vocabulary")
    listed = ", ".join(map(repr, tokenizer.tokens(pieces)))
    raise ValueError(f"--metric: {word!r} is {len(pieces)} tokens, {listed}; take a word that is one token")


# -------------------------------------------------------------------------------------------------------------- results


def show_effect(place: EditPlace, metric: Metric, options: EffectOptions) -> None:
    """One edit, beside the same edit at random places."""
    from regard.edits.effects import effect as measure

    layer, head = place.layers[0], options.head
    assert head is not None
    controls = CONTROLS if options.controls is None else options.controls
    single = place.edit_of(layer, head)
    result = measure(place.run, place.model, single, metric, controls=controls, seed=options.seed or 0)
    if options.json:
        values = {"edit": repr(single), "layer": layer.index, "head": head, **effect_json(result)}
        print_json(_common(place, metric, options) | values)
        return
    out = Terminal(options.lang)
    title = out.say("layer {layer}, head {head}", layer=layer.index, head=head)
    weight = ""
    if result.weight is not None:
        title += f": {place.word(place.token)} → {place.word(place.to)}"
        weight = "   " + out.say("weight {weight}", weight=f"{result.weight:.3f}")
    out.print((title, "bold"), weight)
    # What it does, and what the same edit does elsewhere.
    value = f"{result.value:.4g}"
    if metric.name == KL:
        change = out.say("KL divergence of the prediction {value} nats", value=value)
    elif metric.relative:
        change = out.say("{metric} moves by {value}", metric=metric, value=value)
    else:
        values = {"before": f"{result.before:.4g}", "after": f"{result.after:.4g}", "value": f"{result.value:+.4g}"}
        change = out.say("{metric} goes from {before} to {after} ({value})", metric=metric, **values)
    against = out.say("no controls")
    if result.controls:
        count, mean = len(result.controls), sum(map(abs, result.controls)) / len(result.controls)
        values = {"count": count, "mean": f"{mean:.4g}", "p": f"{result.p_value:.3g}"}
        if result.control_weight is None:
            against = out.say("{count} random other heads {mean} on average, p = {p}", **values)
        else:
            values["weight"] = f"{result.control_weight:.3f}"
            against = out.say("{count} random other keys of weight {weight}: {mean} on average, p = {p}", **values)
    out.print(f"{_edited(place, out.say)}: {change}; {against}")
    out.print((out.say(_caveat(place, options)), "dim"))


def show_heads(place: EditPlace, metric: Metric, options: EffectOptions) -> None:
    """The edit in each head by itself, the largest effect first."""
    import torch

    from regard.edits.editing import edit as edited

    def value(output: ModelOutput) -> float:
        number = float(metric.function(output, place.plain))
        if not isfinite(number):
            raise ValueError(f"the metric {metric} is {number}")
        return number

    rows: list[dict[str, Any]] = []
    before, hidden = value(place.plain), 0
    total = sum(layer.view.sizes[1] for layer in place.layers)
    with bar(place.session.name) as tick:
        for layer in place.layers:
            weights = place.weights(layer).tolist() if place.edit == "knock-out" else None
            for head in range(layer.view.sizes[1]):
                if weights is not None and weights[head] == 0:
                    hidden += 1  # the mask of this layer hides the link
                    continue
                with torch.no_grad(), edited(place.model, place.edit_of(layer, head)):
                    after = value(place.run())
                weight = None if weights is None else weights[head]
                rows.append({"layer": layer.index, "head": head, "weight": weight, "effect": after - before})
                tick(len(rows) + hidden, total)
    rows.sort(key=lambda row: -abs(row["effect"]))
    if options.json:
        values = {"before": before, "method": "exact", "hidden": hidden, "heads": rows[: options.top]}
        print_json(_common(place, metric, options) | values)
        return
    out = Terminal(options.lang)
    shown_rows = [{name: value for name, value in row.items() if value is not None} for row in rows[: options.top]]
    note = out.say("The mask hides the link in {count} more heads.", count=hidden) if hidden else ""
    _print_table(place, f"{_edited(place, out.say)}: {metric}, {out.say('exact')}", shown_rows, metric, options, note)


def show_scan(place: EditPlace, metric: Metric, options: EffectOptions) -> None:
    """Every head, layer or edge edited by itself; the largest effects."""
    from regard.edits.effects import scan

    over, method, top = str(options.scan), options.method or "exact", options.top or TOP
    query = None
    if over == "edges":
        query = place.token.start
        if len(place.token) > 1:
            word, numbers = place.word(place.token), ", ".join(map(str, place.token))
            raise ValueError(f"--scan edges takes one token, and {word!r} is {len(place.token)}: give one of {numbers}")
    result = scan(
        place.run, place.model, metric, over=over, method=method, query=query, progress=sys.stderr.isatty()
    )  # fmt: skip
    strongest = result.top(min(top, result.values.numel()))
    exact = {at: value for at, _, value in result.confirm(len(strongest))} if method == "gradient" else {}
    keys = {"heads": ["layer", "head"], "layers": ["layer"], "edges": ["layer", "head", "key"]}[over]
    rows: list[dict[str, Any]] = []
    for at, value in strongest:
        row: dict[str, Any] = dict(zip(keys, at, strict=False))
        if result.weights is not None:
            row["weight"] = float(result.weights[at])
        row["effect"] = value
        if exact:
            row["exact"] = exact[at]
        rows.append(row)
    if options.json:
        values = {"scan": over, "method": result.method, "layers": result.names, "top": rows}
        print_json(_common(place, metric, options) | values | {"effects": _without_nan(result.values.tolist())})
        return
    title = {"heads": "each head ablated", "layers": "each layer ablated", "edges": "each edge knocked out"}[over]
    _print_table(place, f"{options.say(title)}: {metric}, {options.say(result.method)}", rows, metric, options)


def _print_table(
    place: EditPlace, what: str, rows: list[dict[str, Any]], metric: Metric, options: EffectOptions, note: str = ""
) -> None:
    out = Terminal(options.lang)
    out.print((f"{place.session.name} ({place.model.family.title})", "bold"), f"   {what}")
    out.print()
    signed = "" if metric.relative else "+"

    def cell(name: str, value: Any) -> str:
        if name == "key":
            return f"{value} {shown(place.session.tokens[value])}"
        return f"{value:.3f}" if name == "weight" else str(value) if isinstance(value, int) else f"{value:{signed}.4g}"

    names = list(rows[0]) if rows else ["layer", "head", "weight", "effect"]  # none: the mask hides the link everywhere
    lines = [[cell(name, value) for name, value in row.items()] for row in rows]
    right = [n for n, name in enumerate(names) if name != "key"]
    out.print(tables.text([out.say(name) for name in names], lines, right=right))
    if note:
        out.print(note)
    out.print()
    out.print((out.say(_caveat(place, options)), "dim"))


def _without_nan(values: Any) -> Any:
    """Nested lists with None where a layer has fewer heads."""
    if isinstance(values, list):
        return [_without_nan(value) for value in values]
    return None if isnan(values) else values


def _common(place: EditPlace, metric: Metric, options: EffectOptions) -> dict[str, Any]:
    return {
        "version": VERSION,
        "name": place.session.name,
        "text": place.session.text,
        "tokens": list(place.session.tokens),
        "token": list(place.token) or None,
        "to": list(place.to) or None,
        "metric": metric.name,
        "warning": options.say(_caveat(place, options)),
    }


def _caveat(place: EditPlace, options: EffectOptions) -> str:
    links = options.scan == "edges" or (options.scan is None and place.edit == "knock-out")
    return CAVEAT if links else CAVEAT_OF_HEADS


def _edited(place: EditPlace, say: Callable[..., str]) -> str:
    if place.edit == "ablate":
        return say("head ablated")
    if place.edit == "zero-values":
        return say("values of “{to}” set to 0", to=place.word(place.to))
    return say("“{token}” → “{to}” knocked out", token=place.word(place.token), to=place.word(place.to))


# -------------------------------------------------------------------------------------------------------- regard survey


def survey(options: SurveyOptions) -> int:
    """Survey a corpus and print the strongest heads; 130 if it was interrupted."""
    import torch.distributed as dist

    from regard.edits.survey import SurveyInterrupted, read_measures
    from regard.edits.survey import survey as run
    from regard.session.default_models import default_model, name_of

    # 1. What is wrong with the options alone.
    measures = read_measures(options.measure or ("induction",))
    if not options.texts.is_file():
        raise FileNotFoundError(f"there is no file {str(options.texts)!r}")
    if options.top < 1:
        raise ValueError(f"--top must be at least 1, got {options.top}")
    if "output" in measures and options.out is None and not options.json:
        raise ValueError("--measure output needs --out DIR, which keeps the outputs, or --json")

    # 2. Survey, and print from the first process.
    name = default_model() if options.model is None else options.model
    try:
        result = run(
            open_model(name, options), options.texts, measures, out=options.out, batch_size=options.batch,
            limit=options.limit, length=options.length,
        )  # fmt: skip
        if not dist.is_initialized() or dist.get_rank() == 0:
            if options.json:
                print_json({"model": str(name)} | as_json(result))
            else:
                room = Terminal(options.lang).room
                print(name_of(Path(name)), result.text(options.lang, options.top, room), sep="   ")
    except SurveyInterrupted as stopped:
        values = {"done": stopped.done, "total": stopped.total}
        lost = options.say("stopped after {done:,} of {total:,} texts; with --out DIR they would be kept", **values)
        kept = options.say("stopped: {done:,} of {total:,} texts are kept; the same command goes on", **values)
        if not dist.is_initialized() or dist.get_rank() == 0:  # of whose texts it speaks
            print(f"regard: {lost if stopped.out is None else kept}", file=sys.stderr, flush=True)
        return INTERRUPTED
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def open_model(name: str | Path, options: SurveyOptions) -> Model:
    """Load the model, with the checkpoint's own head. A process of torchrun takes the device of its number."""
    from torch import device

    where = options.device
    if where != "cpu" and device(where).index is None and "LOCAL_RANK" in os.environ:
        where = f"{where}:{os.environ['LOCAL_RANK']}"
    return load_model(name, where, options.ignore, options.dtype)


def as_json(result: Survey) -> dict[str, object]:
    """All numbers of a survey; the outputs of heads too."""
    measures = {
        name: {part: getattr(result[name], part).tolist() for part in ("mean", "low", "high", "count")}
        for name in result.sums
    }
    outputs = {name: mean.tolist() for name, mean in result.outputs.items()} if result.output_sums else {}
    return {"texts": result.texts, "layers": result.names, "measures": measures, "outputs": outputs}
