"""`regard embed`: a vector for each text, and how similar the texts are.

It reads options and prints or writes what `regard.models.verbs.embedding` computes.
"""

# No `from __future__ import annotations`: typer reads the annotations, and their texts are chosen while this runs.
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard import tables
from regard.cli.file_names import refuse_pictures
from regard.cli.json_numbers import finite
from regard.cli.language import Lang, Say, known, speaker
from regard.cli.matrices import print_matrix
from regard.cli.model_files import open_model
from regard.cli.npy_files import as_numpy_has_it, check_npy, write_npy
from regard.cli.shared_options import options_in
from regard.cli.terminal import Terminal
from regard.cli.text_input import read_texts

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add"]

SHOWN = 4  # numbers of a vector


def add(app: typer.Typer, lang: Lang) -> None:
    """Add the command to the app, with help in a language.

    >>> app = typer.Typer()
    >>> add(app, "en")
    >>> app.registered_commands[0].name
    'embed'
    """
    say, options = speaker(lang), options_in(lang)

    @app.command(
        "embed",
        help=say(
            "A vector for each text, pooled as the checkpoint says, else the mean of its tokens.\n\n"
            "Without --model it is all-MiniLM-L6-v2 of regard[demo]. TEXT '-' is standard input.",
            "텍스트마다 벡터 하나를 만듭니다. 풀링은 체크포인트를 따르고, 없으면 토큰의 평균입니다.\n\n"
            "--model이 없으면 regard[demo]의 all-MiniLM-L6-v2를 씁니다. "
            "TEXT가 '-'이면 표준 입력을 읽습니다.",
        ),
    )
    def embed(
        text: Annotated[
            list[str] | None, typer.Argument(metavar="TEXT", help=say("One, or several.", "하나 또는 여럿."))
        ] = None,
        model: Annotated[str | None, options.model] = None,
        file: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("A text per line.", "한 줄에 텍스트 하나."))
        ] = None,
        out: Annotated[
            Path | None, typer.Option(metavar="FILE", help=say("Write vectors, .npy.", "벡터를 저장, .npy."))
        ] = None,
        similarity: Annotated[
            bool, typer.Option("--similarity", help=say("Cosine of each pair.", "텍스트 사이의 코사인 유사도."))
        ] = False,
        pooling: Annotated[
            str | None,
            typer.Option(metavar="HOW", help=say("mean, cls, max or last.", "mean, cls, max, last 중 하나.")),
        ] = None,
        truncate: Annotated[
            bool, typer.Option("--truncate", help=say("Cut texts that are too long.", "긴 텍스트를 자릅니다."))
        ] = False,
        ignore: Annotated[list[str] | None, options.ignore] = None,
        device: Annotated[str, options.device] = "cpu",
        dtype: Annotated[str | None, options.dtype] = None,
        json_: Annotated[bool, options.json] = False,
        lang: Annotated[str, options.lang] = lang,
    ) -> None:
        spoken = speaker(known(lang))
        check_npy(out)
        refuse_pictures(text or [], "embed")
        texts = read_texts(text or [], file)
        from regard.explorer.sessions import default_model

        name = str(default_model()) if model is None else model
        opened = open_model(name, "embed", ["encode", "none"], dtype=dtype, device=device, ignore=ignore or ())
        # Another pooling than those there are is told by the model.
        vectors = opened.embed(texts, pooling=pooling, truncate=truncate)  # type: ignore[arg-type]
        vectors = as_numpy_has_it(vectors)
        if out is not None:
            write_npy(vectors, out)
        if json_:
            print(_as_json(name, texts, vectors, similarity, out))
        else:
            _print(texts, vectors, similarity, out, spoken)


def _cosines(vectors: "Tensor") -> list[list[float]]:
    from torch.nn.functional import normalize

    unit = normalize(vectors, dim=-1)
    found: list[list[float]] = (unit @ unit.mT).tolist()  # (B, B)
    return found


def _print(texts: list[str], vectors: "Tensor", similarity: bool, path: Path | None, say: Say) -> None:
    from regard.models.verbs.asking import shortened

    out = Terminal()
    count, size = vectors.shape
    title = say(f"texts: {count}, numbers in each vector: {size}", f"텍스트 {count}개, 벡터 크기 {size}")
    out.print((title, "bold"))
    out.print()
    if similarity:
        numbers = [str(n) for n in range(count)]
        labels = [f"{n}  {shortened(text, 24)}" for n, text in zip(numbers, texts, strict=True)]
        print_matrix(_cosines(vectors), labels, numbers, heat=True, say=say, out=out)
    else:
        rows = [
            [shortened(text), "  ".join(f"{x:.4f}" for x in vector[:SHOWN]) + "  …"]
            for text, vector in zip(texts, vectors.tolist(), strict=True)
        ]
        out.print(tables.text([say("text", "텍스트"), say("vector", "벡터")], rows))
    if path is not None:
        out.print()
        out.print(say("Vectors: ", "벡터: "), str(path))


def _as_json(name: str, texts: list[str], vectors: "Tensor", similarity: bool, path: Path | None) -> str:
    said = {"model": name, "texts": texts, "vectors": vectors.tolist(), "out": None if path is None else str(path)}
    if similarity:
        said["similarity"] = _cosines(vectors)
    return json.dumps(finite(said), ensure_ascii=False, allow_nan=False)
