"""Build the site: gather documents, lessons and the API reference into build/docs, then run mkdocs on them.

    python docs/build_site.py            # what `make docs` runs: site/
    python docs/build_site.py --fast     # lessons without their outputs

Pages are named X.md (English) and X.ko.md (Korean). A page without a Korean version is shown in English in both.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import shutil
import sys
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any

from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this checkout's regard, whichever is installed

import regard  # noqa: E402
from regard.learn import Lesson, LessonRun, lessons, page, question_command  # noqa: E402
from regard.locale import Lang  # noqa: E402

LANGS: tuple[Lang, ...] = ("en", "ko")
FENCE = re.compile(r"^(```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)(?P<dot>(?: · )?)")
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<name>\w+)\.png\)")
LESSONS = {
    "en": (
        "Lessons",
        "Each lesson is a page here, a notebook to download, and a walk in the terminal: `regard learn`.",
        "Question | In the terminal",
    ),
    "ko": (
        "강의",
        "강의는 이 사이트에서 읽거나, 노트북으로 내려받거나, 터미널(`regard learn --lang ko`)에서 들을 수 있습니다.",
        "문제 | 터미널에서",
    ),
}
DOWNLOAD = {"en": "Download the notebook", "ko": "노트북 내려받기"}


def documents() -> dict[str, str]:
    """The files that become pages, by path in the checkout, with their names in the site."""
    names = {"README.md": "index.md", "README.ko.md": "index.ko.md"}
    names |= {"CONTRIBUTING.md": "contributing.md", "CONTRIBUTING.ko.md": "contributing.ko.md"}
    files = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "gallery").glob("*.md")])
    return names | {path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix() for path in files}


def rewritten(text: str, source: str, names: dict[str, str]) -> str:
    """A document as the site needs it: links by titles of pages, to other files as text, lists after a blank line.

    Args:
        text: Markdown as GitHub reads it.
        source: path of the document in the checkout.
        names: as of `documents`.
    """
    folder = dirname(names[source]) or "."

    def link(match: re.Match[str]) -> str:
        path, _, anchor = match["target"].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        target = normpath(f"{Path(source).parent.as_posix()}/{path}")
        if target.replace(".ko.md", ".md") == source.replace(".ko.md", ".md"):
            return ""  # to the other language: every page has a switch for that
        if target == "tutorials":
            return f"[{match['text']}]({relpath('lessons/index.md', folder)}){match['dot']}"
        if target in names:
            page_name = relpath(names[target].replace(".ko.md", ".md"), folder) + (f"#{anchor}" if anchor else "")
            shown = _title(target) if match["text"].strip("`") in (path, target) else match["text"]
            return f"{match['image']}[{shown}]({page_name}){match['dot']}"
        if target.startswith("docs/") and (ROOT / target).is_file():
            return f"{match['image']}[{match['text']}]({relpath(target.removeprefix('docs/'), folder)}){match['dot']}"
        if not (ROOT / target).exists():
            raise FileNotFoundError(f"{source} links to {match['target']!r}, which is not there")
        where = "" if match["text"].strip("`") == target else f" (`{target}`)"
        return f"{match['text']}{where}{match['dot']}"

    parts = FENCE.split(text)
    for n, part in enumerate(parts):
        if n % 2:
            parts[n] = re.sub(r"^```(\w+) .*", r"```\1", part, count=1)
        else:
            parts[n] = LINK.sub(link, part)
            parts[n] = re.sub(r"^((?![-*>|#] |\d+\. | |$).+)\n(?=[-*] |1\. )", r"\1\n\n", parts[n], flags=re.MULTILINE)
    return "".join(parts)


def _title(document: str) -> str:
    return (ROOT / document).read_text("utf-8").partition("\n")[0].removeprefix("# ")


def linked(picture: re.Match[str], folder: Path) -> str:
    """A picture of the gallery, as a link to its page if that is in the folder."""
    page_name = f"{picture['name']}.html"
    return f"[{picture[0]}]({page_name})" if (folder / page_name).exists() else picture[0]


def with_english_anchors(korean: str, english: str) -> str:
    """A translation whose headings can be reached by the anchors of the original too, from pages in English."""
    slug = slugify(case="lower")
    parts = FENCE.split(korean)
    headings = re.findall(r"^##+ (.*)$", "".join(FENCE.split(english)[::2]), re.MULTILINE)
    anchors = iter(slug(re.sub("`", "", heading), "-") for heading in headings)
    for n in range(0, len(parts), 2):
        parts[n] = re.sub(r"^##", lambda _: f'<a id="{next(anchors, "")}"></a>\n\n##', parts[n], flags=re.MULTILINE)
    same = len(headings) == len(re.findall(r"^##+ ", "".join(FENCE.split(korean)[::2]), re.MULTILINE))
    return "".join(parts) if same else korean


def write_lesson(lesson: Lesson, out: Path, *, run: bool) -> None:
    """Write the page, figures and notebook of a lesson."""
    import jupytext

    files = out / "lessons" / lesson.name / lesson.lang
    files.mkdir(parents=True)
    notebook = jupytext.read(lesson.path, fmt="py:percent")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    for cell in notebook.cells:  # folded, until the reader has an answer
        if {"answer", "why"} & {*cell.metadata.get("tags", ())}:
            cell.metadata["jupyter"] = {"source_hidden": True}
    jupytext.write(notebook, files / f"{lesson.name}.ipynb", fmt="ipynb")

    def link(path: Path) -> str:
        inside = f"{lesson.name}/{lesson.lang}/{path.name}"
        if path.suffix == ".html":  # in a frame, whose address mkdocs does not translate
            return f"../{'../../lessons/' if lesson.lang == 'ko' else ''}{inside}"
        return inside

    text = page(lesson, LessonRun(lesson, files, html=True) if run else None, link)
    title, _, rest = text.partition("\n")
    download = f"[{DOWNLOAD[lesson.lang]}]({link(files / f'{lesson.name}.ipynb')}){{ .download download }}"
    terminal = f"`regard learn {lesson.number}{' --lang ko' if lesson.lang == 'ko' else ''}`"
    suffix = ".ko.md" if lesson.lang == "ko" else ".md"
    (out / "lessons" / f"{lesson.name}{suffix}").write_text(f"{title}\n\n{download} {terminal}\n{rest}", "utf-8")


def write_lesson_list(lang: Lang, out: Path) -> None:
    """Write the page that lists the lessons and their questions, each with its command."""
    title, line, head = LESSONS[lang]
    slug, suffix = slugify(case="lower"), ".ko.md" if lang == "ko" else ".md"
    parts = [f"# {title}", line]
    for each in lessons(lang):
        rows = [f"| {head} |", "|---|---|"]
        for question in each.questions:
            address = f"{each.name}.md#{slug(question.title.replace('`', ''), '-')}"
            rows.append(f"| [{question.title}]({address}) | `{question_command(each, question)}` |")
        parts += [f"## {each.number}. [{each.title}]({each.name}.md)", each.summary, "\n".join(rows)]
    (out / "lessons" / f"index{suffix}").write_text("\n\n".join(parts) + "\n", "utf-8")


def write_reference(out: Path) -> list[Any]:
    """Write the pages of the public names; return their part of the navigation."""
    folder = out / "reference"
    folder.mkdir()
    modules = [name for name in regard.__all__ if type(getattr(regard, name)).__name__ == "module"]
    names = [name for name in regard.__all__ if name not in modules]
    blocks = [f"::: {regard._HOME[name]}.{name}" for name in sorted(names, key=str.lower)]
    (folder / "index.md").write_text("# regard\n\n" + "\n\n".join(blocks) + "\n", "utf-8")
    for name in modules:
        members = getattr(getattr(regard, name), "__all__", None)
        options = {"show_root_heading": False, "show_root_toc_entry": False} | ({"members": members} if members else {})
        block = f"::: {regard._HOME[name]}\n    options: {json.dumps(options)}"
        (folder / f"{name}.md").write_text(f"# regard.{name}\n\n{block}\n", "utf-8")
    return ["reference/index.md", *(f"reference/{name}.md" for name in modules)]


def gather(out: Path, *, run: bool = True) -> list[Any]:
    """Write all pages below a directory, which is emptied; return the navigation of mkdocs.yml, filled in.

    Args:
        out: the directory.
        run: run the lessons; without it their pages have no outputs.
    """
    import yaml

    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(ROOT / "docs", out, ignore=shutil.ignore_patterns("*.md", "*.py", "__pycache__"))
    names = documents()
    for source, name in names.items():
        text = rewritten((ROOT / source).read_text("utf-8"), source, names)
        if name.startswith("gallery/"):  # a picture leads to its page, where `make gallery` has made one
            text = PICTURE.sub(lambda match: linked(match, out / "gallery"), text)
        if name.endswith(".ko.md"):
            text = with_english_anchors(text, (ROOT / source.replace(".ko.md", ".md")).read_text("utf-8"))
        (out / name).write_text(text, "utf-8")
    for lang in LANGS:
        for lesson in lessons(lang):
            write_lesson(lesson, out, run=run)
        write_lesson_list(lang, out)
    reference = write_reference(out)
    untranslated = [name for name in names.values() if not (out / name.replace(".md", ".ko.md")).exists()]
    print("English only:", ", ".join(name for name in untranslated if not name.endswith(".ko.md")))
    nav: list[Any] = yaml.unsafe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"]
    pages = {
        "Lessons": ["lessons/index.md", *(f"lessons/{each.name}.md" for each in lessons())],
        "Reference": reference,
    }
    return [{k: v or pages[k] for k, v in entry.items()} if isinstance(entry, dict) else entry for entry in nav]


def build(docs: Path, site: Path, *, run: bool = True) -> None:
    """Build the site into `site`; a warning of mkdocs is an error."""
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "true")
    from mkdocs.commands.build import build as run_mkdocs
    from mkdocs.config import load_config

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    nav = gather(docs, run=run)
    config = load_config(str(ROOT / "mkdocs.yml"), docs_dir=str(docs), site_dir=str(site), nav=nav, strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    try:
        run_mkdocs(config)
    finally:
        config.plugins.on_shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fast", action="store_true", help="lessons without their outputs")
    parser.add_argument("--site", type=Path, default=ROOT / "site", help="where the site is written")
    given = parser.parse_args()
    build(ROOT / "build" / "docs", given.site, run=not given.fast)
