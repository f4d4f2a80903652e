"""A session in the terminal: its tokens, the strongest links of words, every head in one picture, a token's exact row.

It reads options and prints; `regard.explorer` measures and ranks. It does not know arrays.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.cli import picture_files
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, speaker
from regard.cli.model_files import bar
from regard.cli.picture_input import require_reading
from regard.cli.session_files import print_written, write_session
from regard.cli.terminal import Terminal
from regard.cli.unknown_words import unknown_words

if TYPE_CHECKING:
    from regard.explorer.answer_types import Opening
    from regard.explorer.ranking import Layer, Link
    from regard.explorer.sessions import Session

__all__ = [
    "Asked",
    "as_plain",
    "atlas",
    "check_device",
    "find_layer",
    "plain_layer",
    "print_sections",
    "read_text",
    "show",
]

VERSION = 1
DEMO = "all-MiniLM-L6-v2"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What of a session is wanted, and where it goes; None where nothing was said.

    layer: a number or a module's path.  token: a position or a word.  every: rank all tokens, by weight alone.
    photo: of a picture, whether it may be inside what is written.
    """

    layer: str | None = None
    head: int | None = None
    token: str | None = None
    measure: str = "entropy"
    top: int = 8
    every: bool = False
    html: Path | None = None
    save: Path | None = None
    figure: Path | None = None
    photo: bool = True


@dataclass(frozen=True)
class _Focus:
    """Where to look: some of the layers, one head or all, some tokens or all."""

    layers: list[Layer]
    head: int | None
    tokens: list[int] | None


# ------------------------------------------------------------------------------------------------------------- reading


def read_text(
    text: str, model: str | None, *, device: str = "cpu", truncate: bool = False, ignore: Sequence[str] = ()
) -> tuple[Session, int]:
    """Let a model read a text while a bar shows how far it is loaded: the session, and how many tokens the text has.

    >>> session, length = read_text("The cat sat.", None)                                     # doctest: +SKIP
    >>> length                                                                                # doctest: +SKIP
    6

    model: a directory or a hub id; None is the demo's MiniLM.  ignore: keys of its files to go on without.
    Raises ValueError for a text that is empty, or longer than the model takes and not to be cut, and for a device that
    is none; ImportError without MiniLM; else as `regard.load`.
    """
    from regard.explorer.sessions import default_model, look_at
    from regard.models.loading import load
    from regard.models.text_model import TextModel

    if not text.strip():
        raise ValueError("there is nothing to look at: the text is empty")
    check_device(device)
    name = str(default_model()) if model is None else model
    with bar("/".join(Path(name).parts[-2:])) as tick:
        loaded = load(name, device=device, ignore=ignore, progress=tick)
    require_reading(loaded, text, f"regard look photo.jpg --model {name}")
    length = int(loaded.tokenizer.batch([text]).ids.shape[1])
    most = loaded.most if isinstance(loaded, TextModel) else None
    if most is not None and length > most and not truncate:
        raise ValueError(
            f"the text has {length:,} tokens, and {loaded.family.title} takes at most {most:,} here: "
            "shorten it, or cut it with --truncate"
        )
    session = look_at(text, loaded, truncate=truncate)
    return session if model is not None else replace(session, name=DEMO), length


def check_device(device: str) -> None:
    """Raise ValueError for a device that cannot be used here."""
    import torch

    try:
        torch.zeros((), device=device)
    # By RuntimeError torch says that a name is unknown, by AssertionError that it was built without CUDA.
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None


def _focus(session: Session, asked: Asked) -> _Focus:
    """Read --layer, --head and --token. Raises ValueError or IndexError with what there is."""
    from regard.explorer.ranking import layers_of

    layers = layers_of(session)
    if not layers:
        session.capture.summary()  # which raises, and says what is known about why
    if asked.head is not None and asked.layer is None:
        raise ValueError(f"--head {asked.head} needs --layer: each layer has heads of its own")
    if asked.layer is not None:
        layers = [find_layer(layers, asked.layer)]
        heads = layers[0].view.sizes[1]
        if asked.head is not None and not 0 <= asked.head < heads:
            raise IndexError(f"--head {asked.head} is out of range: there are {heads}, counted from 0")
    tokens = None if asked.token is None else _tokens(session.tokens, asked.token)
    return _Focus(layers, asked.head, tokens)


def find_layer(layers: list[Layer], wanted: str) -> Layer:
    """The layer that --layer names, by its number or its module's path. Raises ValueError with what there is."""
    found = [layer for layer in layers if layer.path == wanted]
    if len(found) > 1:
        numbers = ", ".join(str(layer.index) for layer in found)
        raise ValueError(f"--layer {wanted!r} ran {len(found)} times: say which by its number, one of {numbers}")
    if found:
        return found[0]
    if not (wanted.isascii() and wanted.isdigit()):
        raise ValueError(f"--layer {wanted!r} is neither a number nor a module; there are {_some(layers)}")
    if int(wanted) >= len(layers):
        raise ValueError(f"--layer {wanted} is out of range: there are {len(layers)} layers, counted from 0")
    return layers[int(wanted)]


def _some(layers: list[Layer]) -> str:
    names = [layer.path or "(model)" for layer in layers]
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _tokens(labels: Sequence[str], wanted: str) -> list[int]:
    """The positions of a token: a number, or a word that may stand at several and be made of several."""
    from regard.explorer.token_words import find_word

    if wanted.isascii() and wanted.isdigit():
        if int(wanted) >= len(labels):
            raise IndexError(f"--token {wanted} is out of range: there are {len(labels):,} tokens, counted from 0")
        return [int(wanted)]
    found = [place for run in find_word(labels, wanted) for place in run]
    if not found:
        raise ValueError(f"--token {wanted!r} is not in the text; without --token its tokens are listed with numbers")
    return found


# --------------------------------------------------------------------------------------------------------- plain values


def as_plain(session: Session, asked: Asked, lang: Lang) -> dict[str, Any]:
    """What is said of a session, in values that JSON holds.

    >>> import torch, regard
    >>> from regard.explorer.sessions import Session
    >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    >>> with regard.watch(layer, keep="qk") as seen:
    ...     _ = layer(torch.zeros(1, 3, 8))
    >>> said = as_plain(Session("toy", seen, ("a", "b", "c")), Asked(token="c", layer="0", head=1), "en")
    >>> said["chosen"], [round(weight, 2) for weight in said["row"]["weights"]]
    ([2], [0.33, 0.33, 0.33])

    Raises ValueError, IndexError or LookupError for a layer, head, token or measure that is not there, and for a
    token's row where queries and keys were not kept.
    """
    from regard.explorer.ranking import obstacle, strongest
    from regard.explorer.sentences import WARNING

    focus = _focus(session, asked)
    why = obstacle(focus.layers, focus.tokens)
    links: list[Link] | None = None
    if why is None:
        links = strongest(
            session, focus.layers, count=asked.top, head=focus.head, queries=focus.tokens, every=asked.every
        )
    row = None if focus.tokens is None else _row(session, focus, links or [])
    return {
        "version": VERSION,
        "name": session.name,
        "text": session.text,
        "tokens": list(session.tokens),
        "chosen": focus.tokens,
        "layers": [plain_layer(layer) for layer in focus.layers],
        "measure": asked.measure,
        "atlas": atlas(session, focus.layers, asked.measure),
        "patterns": [[list(names) for names in session.numbers[layer.index].names] for layer in focus.layers],
        "rest": [list(session.numbers[layer.index].rest) for layer in focus.layers],
        "ranking": "weight" if asked.every else "far",
        "links": None if links is None else [_of_link(session, link) for link in links],
        "obstacle": why,
        "row": row,
        "head": _card(session, focus, lang),
        "warning": WARNING[lang],
    }


def plain_layer(layer: Layer) -> dict[str, Any]:
    """A layer in values that JSON holds."""
    _, heads, nq, nk = layer.view.sizes
    return {
        "index": layer.index, "path": layer.path, "kind": layer.view.kind, "heads": heads, "queries": nq, "keys": nk
    }  # fmt: skip


def _of_link(session: Session, link: Link) -> dict[str, Any]:
    return {**link._asdict(), "words": [session.tokens[link.query], session.tokens[link.key]]}


def atlas(session: Session, layers: list[Layer], measure: str) -> list[list[float | None]]:
    """(layers, heads), None where a layer does not know the measure. Raises ValueError for one that none knows."""
    rows: list[list[float | None]] = []
    known: dict[str, None] = {}
    for layer in layers:
        numbers = session.numbers[layer.index]
        named = {"entropy": numbers.entropy, "effective": numbers.effective, "received_max": numbers.share}
        there = {name: values for name, values in named.items() if values is not None} | numbers.patterns
        known |= dict.fromkeys(there)
        values = there.get(measure)
        rows.append([None] * layer.view.sizes[1] if values is None else values.tolist())
    if measure not in known:
        raise ValueError(f"--measure {measure!r} is not known here; there are {', '.join(known)}")
    return rows


def _row(session: Session, focus: _Focus, links: list[Link]) -> dict[str, Any] | None:
    """The exact row of the first of the tokens in the chosen head, or in the head of their first link."""
    assert focus.tokens is not None
    if focus.head is not None:
        layer, head, token = focus.layers[0], focus.head, focus.tokens[0]
    elif links:
        layer = next(layer for layer in focus.layers if layer.index == links[0].layer)
        head, token = links[0].head, links[0].query
    else:
        return None
    if layer.start is None or not 0 <= token - layer.start < layer.view.sizes[2]:
        raise LookupError(f"token {token} asks nothing in layer {layer.index}: its queries are not tokens of this text")
    weights = layer.view.row(token - layer.start)[0, head]  # (Nk,); LookupError without q and k
    return {"layer": layer.index, "head": head, "token": token, "weights": weights.tolist()}


def _card(session: Session, focus: _Focus, lang: Lang) -> dict[str, Any] | None:
    if focus.head is None:
        return None
    from regard.explorer.answers import head

    answer = head(session, focus.layers[0].index, focus.head, lang)
    return {"sentence": answer["sentence"], "numbers": dict(answer["numbers"]), "patterns": dict(answer["patterns"])}


# ------------------------------------------------------------------------------------------------------------- showing


def show(session: Session, asked: Asked, *, json_: bool, lang: Lang, length: int | None = None) -> None:
    """Print a session, or what JSON holds of it, and write the files that were asked for.

    length: tokens of the text before it was cut; None where nothing was cut.
    """
    said = as_plain(session, asked, lang)
    written = _write_files(session, asked, said, lang)
    kept = len(session.tokens)
    if json_:
        full = length if length is not None and length > kept else None
        print(json.dumps(finite({**said, "cut_from": full, **written}), ensure_ascii=False, allow_nan=False))
        return
    say, out = speaker(lang), Terminal()
    out.print(*_title(session, said, say))
    if length is not None and length > kept:
        cut = say(f"cut: the first {kept:,} of {length:,} tokens", f"잘림: 토큰 {length:,}개 중 처음 {kept:,}개")
        out.print((cut, "yellow"))
    if unknown := unknown_words(session, lang):
        out.print((unknown, "yellow"))
    out.print()
    print_sections(said, asked, lang, out)
    print_written(written, lang, out)


def _title(session: Session, said: dict[str, Any], say: Say) -> list[Any]:
    heads = sum(layer["heads"] for layer in said["layers"])
    layers, tokens = len(said["layers"]), len(said["tokens"])
    size = say(
        f"   {tokens:,} tokens, {layers} {'layers' if layers != 1 else 'layer'}, {heads} heads",
        f"   토큰 {tokens:,}개, 레이어 {layers}개, 헤드 {heads}개",
    )
    family = "" if session.model is None else f" ({session.model.family.title})"
    return [(session.name + family, "bold"), (size, "dim")]


def print_sections(said: dict[str, Any], asked: Asked, lang: Lang, out: Terminal, tokens: bool = True) -> None:
    """Print what `as_plain` said: the tokens, the links, a row, and the atlas unless a single head is looked at."""
    from regard.cli.terminal_atlas import print_atlas
    from regard.cli.terminal_words import print_row, print_tokens

    labels = said["tokens"]
    if tokens:
        print_tokens(labels, said["chosen"] or [], lang, out)
        out.print()
    if said["row"] is None or asked.head is None:
        _print_links(said, asked, lang, out)
        out.print()
    if said["row"] is not None:
        print_row(said["row"], labels, asked.top, lang, out)
        out.print()
    if said["head"] is not None:
        out.print(said["head"]["sentence"])
    else:
        print_atlas(said, lang, out)
    out.print()
    out.print((said["warning"], "italic"))


def _print_links(said: dict[str, Any], asked: Asked, lang: Lang, out: Terminal) -> None:
    from regard.cli.terminal_words import print_links

    say = speaker(lang)
    if said["links"] is None:
        why = {
            "weights": say(
                "Links need q and k of the tokens: watch(model, keep='qk', tokens=…)",
                "연결을 보려면 토큰의 q와 k가 필요합니다: watch(model, keep='qk', tokens=…)",
            ),
            "length": say(
                "So long a text has too many links to rank: name a token or a layer (--token, --layer)",
                "텍스트가 길어 모든 연결을 비교하지 않습니다: --token이나 --layer를 지정하세요",
            ),
        }
        out.print((why[said["obstacle"]], "dim"))
        return
    title = (
        say("Strongest links of all tokens", "모든 토큰의 가장 강한 연결")
        if asked.every
        else say("Strongest links of words", "단어 사이의 강한 연결")
    )
    how = (
        say(", by weight", ", 가중치순")
        if asked.every
        else say(", rather far than near (--help says how)", ", 먼 것 우선 (순위 기준은 --help)")
    )
    out.print((title, "bold"), (how, "dim"))
    print_links(said["links"], said["tokens"], lang, out)


# --------------------------------------------------------------------------------------------------------------- files


def _write_files(session: Session, asked: Asked, said: dict[str, Any], lang: Lang) -> dict[str, str | None]:
    if asked.figure is not None:
        picture_files.write(_picture(session, asked, said), asked.figure)
    named = None if asked.figure is None else str(asked.figure)
    shown = session if asked.html is None else replace(session, opening=_opening(session, asked, said))
    return write_session(shown, asked.html, asked.save, lang) | {"figure": named}


def _opening(session: Session, asked: Asked, said: dict[str, Any]) -> Opening | None:
    """Where the page opens: on the exact row or the first link that is printed; None for the page's own choice."""
    from regard.explorer.ranking import obstacle, strongest

    focus, row, links = _focus(session, asked), said["row"], said["links"] or []
    if row is not None:
        at = {"layer": row["layer"], "head": row["head"], "query": row["token"]}
        found = next((link for link in links if at.items() <= link.items()), at | {"key": None})
    elif links:
        found = links[0]
    elif obstacle(focus.layers, focus.tokens) is None and focus.tokens is not None:  # of what is no word, all links
        every = strongest(session, focus.layers, count=1, head=focus.head, queries=focus.tokens, every=True)
        found = every[0]._asdict() if every else None
    else:
        found = None
    if found is not None:
        start = next(layer.start for layer in focus.layers if layer.index == found["layer"])
        return {
            "layer": found["layer"],
            "head": found["head"],
            "token": found["query"] - (start or 0),
            "key": found["key"],
        }
    if asked.layer is None:
        return None
    return {"layer": focus.layers[0].index, "head": focus.head or 0, "token": None, "key": None}


def _picture(session: Session, asked: Asked, said: dict[str, Any]) -> Any:
    """The map of one head, or the atlas of all."""
    from regard.lens.showing import atlas_of, picture_of

    if asked.layer is None:
        return atlas_of(session.capture, asked.measure)
    layer = session.layers[said["layers"][0]["index"]]
    labels = list(session.tokens) if any(session.tokens) and layer.view.sizes[3] == len(session.tokens) else None
    return picture_of(layer.view, batch=0, head=asked.head, tokens=labels)
