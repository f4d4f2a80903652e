"""Weights and causes on real models: python benchmarks/causes.py NAME --data DIR

stories   heads of a LLaMA of 15 M on repeated words: induction and previous-token heads by weight and by effect
cross     cross-attention of flan-t5-small while it generates: hide the source word of each word that it copies
dinov2    rollout and relevance of a photograph beside the measured effect of hiding its patches, drawn on it
nsmc      how faithful weights, rollout and norms are to a Korean ALBERT that judges film reviews
survey    a survey of film reviews on one process, on two, and interrupted: are its sums the same bytes?

DIR holds the files named in each function. Results are kept in benchmarks/results/why.md.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import regard
from regard import edits, metrics
from regard.data.image_processing import ImageProcessor
from regard.edits.faithfulness import FRACTIONS, Faithfulness
from regard.edits.survey import Survey
from regard.masks import dense

UNUSED = ("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")  # keys of albert-ko's config
CONTROLS = 20


def spearman(a: Tensor, b: Tensor) -> float:
    """Rank correlation; ties do not occur among measured floats."""
    ranks = [x.flatten().double().argsort().argsort().double() for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a Markdown table."""
    for row in (headers, ["---"] * len(headers), *rows):
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)


# ------------------------------------------------------------------------------------------------------------- stories


def stories(options: argparse.Namespace) -> None:
    """stories15m/ with tokenizer.bin, and tinystories_a.txt, of which the words are taken."""
    data, length, device = options.data, 48, options.device
    model = regard.load(data / "stories15m", device=device)

    # 1. <s> and 48 different words in random order, twice; rows differ.
    numbers, raw, at = dict[str, int](), (data / "stories15m" / "tokenizer.bin").read_bytes(), 4
    for number in range(model.config.vocab_size):  # each piece has a score, its length and its bytes
        size = int.from_bytes(raw[at + 4 : at + 8], "little")
        numbers[raw[at + 8 : at + 8 + size].decode("utf-8", "replace")] = number
        at += 8 + size
    words = Counter(re.findall(r"[a-z]+", (data / "tinystories_a.txt").read_text("utf-8")))
    frequent = [f" {word}" for word, count in words.items() if count >= 50]
    known = torch.tensor([numbers[word] for word in frequent if word in numbers])
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([known[torch.randperm(len(known), generator=generator)[:length]] for _ in range(options.count)])
    ids = torch.cat([torch.ones(len(rows), 1, dtype=torch.long), rows, rows], 1).to(device)
    print(f"{len(rows)} rows of {length} words out of {len(known)}, each row twice\n")

    def log_probs(output: Any) -> Tensor:
        return output.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].mean(0)

    def second(output: Any) -> Tensor:
        """Mean log probability of the words of the second half, but for its first, which nothing foretells."""
        return log_probs(output)[length + 1 :].mean()

    def run() -> Any:
        return model(ids)

    with torch.no_grad(), regard.watch(model, tokens=ids.tolist(), keep="qk") as seen:
        plain = log_probs(run())
    before = float(plain[length + 1 :].mean())
    print(f"log probability of a word: first time {float(plain[1:length].mean()):.3f}, second time {before:.3f}\n")

    # 2. Per head: hide one key of each query, that of the pattern or one at a random distance, or take the head away.
    zeroed = regard.scan(run, model, second).values
    heads = [(layer, head) for layer in range(zeroed.shape[0]) for head in range(zeroed.shape[1])]
    total = 2 * length + 1
    patterns = {  # name → the distance to its key, the first query, distances of the controls
        "induction": (length - 1, length + 1, [d for d in range(1, length + 2) if d not in (length - 1, length)]),
        "previous": (1, 1, list(range(2, length - 1))),
    }
    for name, (distance, first, others) in patterns.items():
        drawn = random.Random(0).sample(others, CONTROLS)

        def without(distance: int, layer: int | None = None, head: int | None = None, first: int = first) -> float:
            q, k = torch.arange(total)[:, None], torch.arange(total)[None]
            edge = edits.knock_out(layer, head, edges=dense((q - k == distance) & (q >= first)))
            with torch.no_grad(), regard.edit(model, edge):
                return float(second(run())) - before

        scores = seen.atlas(name).double()
        effects = torch.tensor([without(distance, *head) for head in heads], dtype=torch.float64).view_as(scores)
        by_effect, by_weight = (sorted(heads, key=lambda head, x=x: -float(x[head])) for x in (-effects, scores))  # type: ignore[misc]
        picked = list(dict.fromkeys([*by_effect[:4], *by_weight[:4]]))
        shown = []
        for head in picked:
            controls = [without(d, *head) for d in drawn]
            as_large = sum(abs(control) >= abs(float(effects[head])) for control in controls)
            shown.append([
                "{}.{}".format(*head), f"{float(scores[head]):.3f}", by_weight.index(head) + 1,
                f"{float(effects[head]):+.4f}", by_effect.index(head) + 1,
                f"{sum(controls) / CONTROLS:+.4f}", f"{(1 + as_large) / (1 + CONTROLS):.3f}",
                f"{float(zeroed[head]):+.3f}",
            ])  # fmt: skip
        print(f"{name}: the key {distance} back\n")
        table(
            ["head", "weight", "rank", "without its key", "rank", f"{CONTROLS} other keys", "p", "without the head"],
            shown,
        )
        joint, by_chance = without(distance), [without(d) for d in drawn]
        print(
            f"Spearman over {len(heads)} heads: weight and fall without the key {spearman(scores, -effects):.2f}, "
            f"weight and fall without the head {spearman(scores, -zeroed):.2f}. In all heads together: {joint:+.3f}, "
            f"at other distances {sum(by_chance) / CONTROLS:+.3f} ({min(by_chance):+.3f} … {max(by_chance):+.3f}).\n",
            flush=True,
        )


# --------------------------------------------------------------------------------------------------------------- cross


SOURCES = (
    "Fix login bug: users could not sign in after the password reset because the session token expired too early.",
    "Explain how the garden robot waters the tomatoes every evening without wasting rain water.",
    "The nurse asked the engineer to repair the broken elevator in the hospital before Monday.",
    "Write a Python script that downloads weather data for Berlin and plots the temperature.",
    "A tourist lost her passport at the airport and the embassy in Madrid issued a new one.",
    "Add a dark theme to the settings page and remember the choice of the user.",
    "The bakery on the corner sells bread made from rye flour that a farmer grows nearby.",
    "Compare the prices of electric bicycles in three shops and recommend the cheapest one.",
    "The museum will show paintings by Vermeer next spring, and tickets go on sale in January.",
    "Migrate the customer database from MySQL to PostgreSQL and keep a backup of every table.",
    "translate English to German: The house is wonderful.",
)
ALIGNED = {"Haus": "house", "wunderbar": "wonderful"}  # others are copied, and have the token of their source
OTHER_KEYS = 9  # random source tokens beside each link
SHORT = 3  # letters; such words are copied by chance


def cross(options: argparse.Namespace) -> None:
    """flan-t5-small/."""
    model = regard.load(options.data / "flan-t5-small", device=options.device)
    rows, falls, random_falls, strongest, logits = [], list[float](), list[float](), [], list[Tensor]()
    model.head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    for source in SOURCES:
        input_ids = model.tokenizer.batch([source]).input_ids
        words = [word.strip("▁ ") for word in model.tokens(input_ids)[0]]
        with torch.no_grad(), regard.watch(model, keep="qk") as seen:
            output = model.generate(source, max_new_tokens=24)
        layers = [name for name in seen.names if name.endswith(".cross")]
        written = [word.strip("▁ ") for word in model.tokens(output.ids[None])[0]]
        print(f"{source} → {output.text}", flush=True)
        for step, word in enumerate(written):
            places = [n for n, other in enumerate(words) if other == ALIGNED.get(word, word)]
            if len(word) <= SHORT or len(places) != 1 or word == "</s>":
                continue

            # 1. Position `step` of the decoder reads `place` of the source and writes the word.
            def run(source: str = source, step: int = step) -> Any:
                return model.generate(source, max_new_tokens=step + 1)

            def hide(key: int, step: int = step, layers: Sequence[str] = layers) -> edits.Edits:
                return edits.Edits(tuple(edits.knock_out(layer, queries=step, keys=key) for layer in layers))

            place, token = places[0], int(output.ids[step])
            metric = replace(metrics.log_prob(token), path="head")  # of the last call, which is that of this step
            found = regard.effect(run, model, hide(place), metric, controls=0)
            others = []  # the same in all layers, which the controls of `effect` are not
            free = [key for key in range(len(words) - 1) if key != place]  # not </s>
            for key in random.Random(0).sample(free, min(OTHER_KEYS, len(free))):
                logits.clear()
                with regard.edit(model, hide(key)):
                    run()
                others.append(float(logits[-1][0, -1].log_softmax(-1)[token]) - found.before)
            falls.append(found.value)
            random_falls.append(sum(others) / len(others))
            as_large = sum(other <= found.value for other in others)
            p = [f"{torch.tensor(x).exp():.3f}" for x in (found.before, found.after)]
            rows.append([
                f"{words[place]} → {word}", f"{found.weight:.3f}", " → ".join(p), f"{found.value:+.2f}",
                f"{random_falls[-1]:+.2f}", f"{min(others):+.2f}", f"{(1 + as_large) / (1 + len(others)):.3f}",
            ])  # fmt: skip

            # 2. The single heads that give this source word the largest weight.
            for layer in layers:
                weights = seen[layer].row(step)[0, :, place]
                strongest += [
                    (float(weight), layer, head, step, place, f"{words[place]} → {word}", run, metric)
                    for head, weight in enumerate(weights)
                ]
    print()
    table(
        ["link", "weight", "its probability", "log p", f"up to {OTHER_KEYS} other source tokens", "most", "p"],
        rows,
    )
    better = sum(mine < other for mine, other in zip(falls, random_falls, strict=True))
    print(
        f"{len(falls)} words: log p {sum(falls) / len(falls):+.2f} on average, other source tokens "
        f"{sum(random_falls) / len(falls):+.2f}; more than the mean of the others in {better} of {len(falls)}\n"
    )
    chosen, shown = sorted(strongest, key=lambda link: -link[0])[: options.count], []
    for _, layer, head, step, place, name, run, metric in chosen:
        single = regard.effect(run, model, edits.knock_out(layer, head, step, place), metric, controls=CONTROLS)
        control = sum(single.controls) / len(single.controls)
        shown.append([
            f"{re.sub(r'[^0-9]', '', layer)}.{head}", name, f"{single.weight:.3f}", f"{single.value:+.3f}",
            f"{control:+.3f}", f"{single.p_value:.3f}",
        ])  # fmt: skip
    print("The strongest links of single heads:\n")
    table(["layer.head", "link", "weight", "log p", f"up to {CONTROLS} other keys", "p"], shown)


# -------------------------------------------------------------------------------------------------------------- dinov2


def dinov2(options: argparse.Namespace) -> None:
    """dinov2-small/ and chelsea.png; writes PNG files to --out."""
    model = regard.load(options.data / "dinov2-small", device=options.device)
    photograph = Image.open(options.data / options.photo).convert("RGB")
    shorter = min(photograph.size)
    width, height = (round(16 * side / shorter) * 14 for side in photograph.size)  # 16 patches of 14 pixels
    size = {"size": {"height": height, "width": width}, "do_center_crop": False}
    batch = ImageProcessor.of("Bit", size)(photograph)
    pixel_values, sides = batch.pixel_values.to(options.device), model.layouts(batch.frames[0])

    # 1. Rollout and relevance of the cls token. The loss of the relevance is its final vector along itself.
    with regard.watch(model, keep=["qk", "v"], measures=["entropy"], layouts=sides, gradients=True) as seen:
        cls = model(pixel_values=pixel_values).last_hidden_state[0, 0]
        (cls @ cls.detach() / cls.detach().norm()).backward()
    flows = {"rollout": seen.rollout("cls"), "relevance": seen.relevance("cls")}
    drawn = {name: flow.overlay(photograph) for name, flow in flows.items()}
    options.out.mkdir(parents=True, exist_ok=True)
    for name, overlay in drawn.items():  # a patch or two without content have most of the weight (Darcet et al., 2024)
        most = np.quantile(overlay.mass, 0.98)
        title = f"{overlay.title}; clipped at 98 %"
        replace(overlay, mass=overlay.mass.clip(max=most), title=title).save(options.out / f"{name}.png")
        print(f"{overlay}, largest patch {overlay.mass.max():.3f}, 98 % below {most:.4f}", flush=True)

    # 2. The measured map: hide 2 × 2 patches from every token in every layer.
    cells = torch.from_numpy(drawn["rollout"].cells)
    tokens = torch.from_numpy(drawn["rollout"].tokens)[:, 1]
    blocks = {tuple(block): (cells // 2 == block).all(-1) for block in (cells // 2).unique(dim=0)}

    def run() -> Any:
        return model(pixel_values=pixel_values)

    with torch.no_grad():
        plain = run().last_hidden_state[0, 0]
    effects, metric = list[float](), metrics.moved(0)
    for chosen in blocks.values():
        with torch.no_grad(), regard.edit(model, edits.knock_out(keys=tokens[chosen].tolist())):
            effects.append(float(metric.function(run(), plain[None, None])))
    measured = torch.tensor(effects)

    # 3. How far the heuristics agree with what was measured.
    rows = []
    for name, overlay in drawn.items():
        mass = torch.from_numpy(overlay.mass)
        summed = torch.stack([mass[chosen].sum() for chosen in blocks.values()])
        top = measured[summed.argsort(descending=True)[: len(summed) // 10]].mean()
        rows.append([name, f"{spearman(summed, measured):.2f}", f"{float(top):.4f}", f"{float(measured.mean()):.4f}"])
    top = measured.sort(descending=True).values[: len(measured) // 10].mean()
    rows.append(["the best there is", "1.00", f"{float(top):.4f}", f"{float(measured.mean()):.4f}"])
    print()
    table([f"{len(blocks)} blocks of 2 × 2 patches", "Spearman", "cls moves, first tenth", "all"], rows)


# ---------------------------------------------------------------------------------------------------------------- nsmc


def nsmc(options: argparse.Namespace) -> None:
    """albert-ko/, nsmc_train.tsv and nsmc_test.tsv; the trained model is kept in --out and taken up again."""
    from regard.data.rows import read_rows
    from regard.training.loop import train

    # 1. Fine-tune as benchmarks/training.py does.
    data, out = options.data, options.out
    rows = read_rows(data / "nsmc_test.tsv", ("text", "label"))
    if not (out / "model").is_dir():
        model = regard.load(
            data / "albert-ko", task="text-classification", num_labels=2, dtype=torch.float32, device=options.device,
            ignore=UNUSED,
        )  # fmt: skip
        recipe = regard.recipes.TextClassification.for_model(model, length=96)
        train(
            model, recipe, data / "nsmc_train.tsv", out=out, steps=options.steps, batch_size=64, learning_rate=3e-5,
            schedule="linear", final_ratio=0.0, warmup=min(400, options.steps // 4), weight_decay=0.01,
            betas=(0.9, 0.999), log_every=50, precision="bf16" if options.device.startswith("cuda") else "fp32",
        )  # fmt: skip
    model = regard.load(out / "model", dtype=torch.float32, device=options.device).eval()
    right = total = 0
    for first in range(0, min(5000, 50 * options.count), 100):
        part = rows[first : first + 100]
        batch = model.tokenizer.batch([row["text"] for row in part], length=96, truncate=True)
        mask = batch.attention_mask.to(options.device)
        with torch.no_grad():
            labels = model(batch.input_ids.to(options.device), attention_mask=mask).logits.argmax(-1).tolist()
        right += sum(label == int(row["label"]) for label, row in zip(labels, part, strict=True))
        total += len(part)
    print(f"accuracy {right / total:.4f} on the first {total:,} test reviews\n", flush=True)

    # 2. Each review: the scores of its tokens, and how faithful they are to the decision.
    results: dict[str, list[Faithfulness]] = {}
    counted = 0
    for row in rows:
        ids = model.tokenizer.batch([row["text"]], length=96, truncate=True).input_ids.to(options.device)
        if ids.shape[1] < 8:  # [CLS], [SEP] and at least six tokens
            continue
        scores, gradient = token_scores(model, ids)
        known = prefetch(model, ids, list(scores.values()))

        def run(keep: Tensor, ids: Tensor = ids, known: dict[bytes, Tensor] = known) -> Tensor:
            logits = known.get(keep.numpy().tobytes())
            return model(ids, attention_mask=keep[None].to(ids.device)).logits[0] if logits is None else logits

        for name, score in scores.items():
            result = regard.faithful(run, score, gradient=gradient, fixed=(0, -1), controls=CONTROLS)
            results.setdefault(name, []).append(result)
        counted += 1
        if counted == options.count:
            break

    # 3. Means over the reviews, with half of the 95 % interval.
    columns = {
        "comprehensiveness": "comprehensiveness ↑", "sufficiency": "sufficiency ↓", "flip_share": "tokens to a flip ↓",
        "leave_one_out": "τ, leave-one-out ↑", "gradient": "τ, gradient × input ↑",
    }  # fmt: skip
    shown = []
    for name in (*results, "random"):
        cells = [name]
        for column in columns:
            parts = [getattr(result, column) for result in next(iter(results.values()))]
            values = [part.control for part in parts]
            if name != "random":
                values = [getattr(result, column).value for result in results[name]]
            found = torch.tensor(values, dtype=torch.float64)
            cells.append(f"{float(found.mean()):.3f} ± {1.96 * float(found.std()) / len(found) ** 0.5:.3f}")
        shown.append(cells)
    table([f"{counted} reviews", *columns.values()], shown)


@torch.no_grad()
def prefetch(model: Any, ids: Tensor, scores: Sequence[Tensor]) -> dict[bytes, Tensor]:
    """Which tokens are kept, as bytes → logits: what `faithful` will ask for one after the other, in large batches."""
    free, drawn = list(range(1, ids.shape[1] - 1)), random.Random(0)
    orders = [sorted(free, key=lambda n, score=score: -float(score[n])) for score in scores]  # type: ignore[misc]
    orders += [drawn.sample(free, len(free)) for _ in range(CONTROLS)]  # its random scores, of seed 0
    shares = [max(1, round(share * len(free))) for share in FRACTIONS]
    removed = [[], *([token] for token in free)]
    for order in orders:
        removed += [order[:n] for n in range(1, len(order) + 1)] + [order[n:] for n in shares]
    keep = torch.ones(len(removed), ids.shape[1], dtype=torch.bool)
    for row, tokens in zip(keep, removed, strict=True):
        row[tokens] = False
    keep = keep.unique(dim=0)
    parts = [
        model(ids.expand(len(part), -1), attention_mask=part.to(ids.device)).logits.cpu() for part in keep.split(512)
    ]
    return {row.numpy().tobytes(): logits for row, logits in zip(keep, torch.cat(parts), strict=True)}


def token_scores(model: Any, ids: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Scores of the tokens for the decision, (N,) each, and gradient × input; [CLS] is what the classifier reads."""
    embedded: list[Tensor] = []
    embedding = model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, inputs, output: embedded.append(output))
    try:
        with regard.watch(model, keep=["qk", "v"], measures=["entropy"], gradients=True) as seen:
            logits = model(ids).logits[0]
            embedded[0].retain_grad()
            logits[int(logits.argmax())].backward()
    finally:
        handle.remove()
        model.zero_grad(set_to_none=True)
    last = seen.runs()[-1].view
    assert embedded[0].grad is not None
    return {
        "weights, last layer": last.row(0)[0].mean(0),
        "rollout": seen.rollout(0).scores[0],
        "norms, last layer": last.norms(0)[0].mean(0),
        "gradient × weight, last layer": last.weighted_gradients(0)[0].mean(0),
        "relevance": seen.relevance(0).scores[0],
    }, (embedded[0] * embedded[0].grad)[0].sum(-1).abs()


# -------------------------------------------------------------------------------------------------------------- survey


MEASURES = ("induction", "previous", "first", "entropy")


def survey(options: argparse.Namespace) -> None:
    """albert-ko/ and nsmc_test.tsv; runs are kept in --out and taken up again."""
    shards = -(-options.count // options.shard)
    part = [
        str(Path(__file__).resolve()), "survey-part", "--data", str(options.data), "--device", options.device,
        "--count", str(options.count), "--shard", str(options.shard), "--out",
    ]  # fmt: skip
    one = [sys.executable]
    two = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}  # torchrun would set 1 for two processes only

    def finished(name: str) -> int:
        return len(list((options.out / name).glob("shard-*.safetensors")))

    # 1. From beginning to end, on one process and on two.
    seconds = dict[str, float]()
    for name, command in (("one process", one), ("two processes", two)):
        start = time.perf_counter()
        subprocess.run([*command, *part, str(options.out / name)], env=environment, check=True)
        seconds[name] = time.perf_counter() - start

    # 2. Ctrl-C after a third of the shards; the rest on two processes.
    name = "interrupted"
    start = time.perf_counter()
    command = [*one, *part, str(options.out / name)]
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while running.poll() is None and finished(name) < max(1, shards // 3):
        time.sleep(0.02)
    running.send_signal(signal.SIGINT)
    message = (running.communicate()[1].strip().splitlines() or ["it had finished before"])[-1]
    kept = finished(name)
    subprocess.run([*two, *part, str(options.out / name)], env=environment, check=True)
    seconds[name] = time.perf_counter() - start

    # 3. Compare the files.
    rows = []
    names = [f"shard-{n:06d}.safetensors" for n in range(shards)] + ["survey.safetensors"]
    for name in seconds:
        files, first = ([(options.out / run / file).read_bytes() for file in names] for run in (name, "one process"))
        digest = hashlib.sha256(files[-1]).hexdigest()[:12]
        rows.append([name, f"{seconds[name]:.0f} s", digest, "same" if files == first else "**different**"])
    print(f"{options.count:,} reviews, {shards} shards; interrupted after {kept}: {message}\n")
    table(["run", "time", "sha256 of the sums", "all files, byte for byte"], rows)
    whole = Survey.open(options.out / "one process" / "survey.safetensors")
    best = [
        [name, f"{head.layer}.{head.head}", f"{head.mean:.4f}", f"{head.low:.4f} … {head.high:.4f}", head.count]
        for name in MEASURES
        for head in whole[name].top(1)
    ]
    table(["measure", "head", "mean", "95 %", "texts"], best)


def survey_part(options: argparse.Namespace) -> None:
    """One run of `survey`."""
    model = regard.load(options.data / "albert-ko", device=options.device, ignore=UNUSED)
    regard.survey(
        model, options.data / "nsmc_test.tsv", MEASURES, out=options.out, limit=options.count, shard=options.shard,
        progress=False,
    )  # fmt: skip


NAMES: dict[str, Callable[[argparse.Namespace], None]] = {
    "stories": stories,
    "cross": cross,
    "dinov2": dinov2,
    "nsmc": nsmc,
    "survey": survey,
    "survey-part": survey_part,
}
COUNTS = {"stories": 8, "cross": 10, "nsmc": 100, "survey": 10_000, "survey-part": 10_000}
COUNTED = {"stories": "rows of words", "cross": "links to print", "nsmc": "reviews", "survey": "reviews"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="name", required=True)
    for name, function in NAMES.items():
        command = commands.add_parser(name, description=f"--data: {function.__doc__}")
        command.add_argument("--data", type=Path, required=True, help="directory with the files")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        if name in COUNTS:
            command.add_argument("--count", type=int, default=COUNTS[name], help=COUNTED.get(name))
        if name in ("dinov2", "nsmc", "survey", "survey-part"):
            command.add_argument("--out", type=Path, default=Path("out") / name, help="directory for results")
        if name == "dinov2":
            command.add_argument("--photo", default="chelsea.png")
        if name == "nsmc":
            command.add_argument("--steps", type=int, default=4700, help="of fine-tuning")
        if name in ("survey", "survey-part"):
            command.add_argument("--shard", type=int, default=256)
            command.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    options = parser.parse_args()
    start = time.perf_counter()
    NAMES[options.name](options)
    if options.name != "survey-part":
        machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else f"CPU, {platform.machine()}"
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        print(
            f"{options.name}: {machine}, Python {platform.python_version()}, torch {torch.__version__}, "
            f"commit {commit or 'unknown'}, {time.perf_counter() - start:.0f} s"
        )


if __name__ == "__main__":
    main()
