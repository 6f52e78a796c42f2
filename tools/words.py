"""Report coined words in identifiers and prose: ``python tools/words.py [FILES OR FOLDERS]``.

Reads the banned words from ``words.toml`` beside this file and prints one line per hit: file, line,
the word, and what to write instead. Exits with 1 if there is any. Without arguments it checks
``dsv4``, ``tests`` and ``tools``. ``--summary`` prints counts per folder and word instead.

Identifiers are the names that a file binds: modules, classes, functions, arguments, variables and
attributes. Prose is what people read: docstrings, comments, and every string with a space in it,
error messages among them. Names of tests are prose. Code between double backticks is not checked.
"""

from __future__ import annotations

import ast
import fnmatch
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest and mypy depend on it there

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_name("words.toml")
FOLDERS = tuple(str(ROOT / name) for name in ("dsv4", "tests", "tools", "examples"))

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_CODE = re.compile(r"``.*?``", re.DOTALL)
_ARGUMENT = re.compile(r"^\s*\*{0,2}\w+:(?= )", re.MULTILINE)


@dataclass(frozen=True)
class Hit:
    """A coined word in a file."""

    file: str
    line: int
    kind: str  # "identifier" or "prose"
    word: str
    use: str

    def __str__(self) -> str:
        return f'{self.file}:{self.line}: {self.kind} "{self.word}": write {self.use}'


@functools.cache
def _joined_parts(name: str) -> str:
    """The lower-case parts of a name between underscores; every ban asks for those of each name."""
    return f"_{'_'.join(_PART.findall(name)).lower()}_"


@dataclass(frozen=True)
class Names:
    """Banned identifiers.

    Attributes:
        words: Lower-case words; the parts of a compound are joined by underscores.
        use: What to write instead.
        is_part: Whether a word is also banned as part of a longer name.
        where: Folders or files that the ban holds in; everywhere if empty.
    """

    words: tuple[str, ...]
    use: str
    is_part: bool
    where: tuple[str, ...]

    def match(self, name: str) -> str | None:
        """The banned word that a name is or contains."""
        if not self.is_part:
            return name if name.strip("_").lower() in self.words else None
        parts = _joined_parts(name)
        return name if any(f"_{word}_" in parts for word in self.words) else None


@dataclass(frozen=True)
class Phrases:
    """Banned words of docstrings, comments and messages.

    Attributes:
        pattern: What matches one of them.
        use: What to write instead.
        where: Folders or files that the ban holds in; everywhere if empty.
    """

    pattern: re.Pattern[str]
    use: str
    where: tuple[str, ...]


@dataclass(frozen=True)
class Exemption:
    """A use of a banned word that stays, and why."""

    file: str  # a glob
    word: str  # a glob of the word as it is reported
    reason: str


@dataclass(frozen=True)
class Banned:
    """The committed list."""

    names: tuple[Names, ...] = ()
    phrases: tuple[Phrases, ...] = ()
    exemptions: tuple[Exemption, ...] = field(default=())

    def is_exempt(self, hit: Hit) -> bool:
        """Return whether the list lets this use of a word stay."""
        return any(
            fnmatch.fnmatch(hit.file, entry.file) and fnmatch.fnmatch(hit.word, entry.word)
            for entry in self.exemptions
        )


def load(file: Path = LIST) -> Banned:
    """Read a list of banned words.

    Raises:
        ValueError: if an entry has unknown or missing keys, or an exemption has no reason.
    """
    content = tomllib.loads(file.read_text())
    return Banned(
        tuple(_names(entry) for entry in content.get("identifier", ())),
        tuple(_phrases(entry) for entry in content.get("prose", ())),
        tuple(_exemption(entry) for entry in content.get("exemption", ())),
    )


def _checked(entry: dict[str, Any], required: set[str], optional: set[str]) -> dict[str, Any]:
    """An entry of the list, if it has these keys and no others."""
    missing, unknown = required - entry.keys(), entry.keys() - required - optional
    if missing or unknown:
        raise ValueError(f"{entry}: missing keys {sorted(missing)}, unknown keys {sorted(unknown)}")
    return entry


def _names(entry: dict[str, Any]) -> Names:
    entry = _checked(entry, {"words", "use", "match"}, {"where"})
    if entry["match"] not in ("whole", "part"):
        raise ValueError(f"{entry}: match is {entry['match']!r}, expected 'whole' or 'part'")
    where = tuple(entry.get("where", ()))
    return Names(tuple(entry["words"]), entry["use"], entry["match"] == "part", where)


def _phrases(entry: dict[str, Any]) -> Phrases:
    entry = _checked(entry, {"words", "use"}, {"where"})
    joined = "|".join(word.replace(" ", r"\s+") for word in entry["words"])
    pattern = re.compile(rf"(?<![\w-])(?:{joined})(?![\w-])", re.IGNORECASE)
    return Phrases(pattern, entry["use"], tuple(entry.get("where", ())))


def _exemption(entry: dict[str, Any]) -> Exemption:
    entry = _checked(entry, {"file", "word", "reason"}, set())
    if not entry["reason"].strip():
        raise ValueError(f"{entry}: an exemption needs a reason")
    return Exemption(entry["file"], entry["word"], entry["reason"])


def bound_names(file: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a file binds with their lines, its own name first."""
    path = Path(file)
    yield path.parent.name if path.stem == "__init__" else path.stem, 1
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, line
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, line
        elif isinstance(node, ast.arg):
            yield node.arg, line
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, line
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, line
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            yield node.name, line


def texts(source: str, tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Docstrings, messages and comments with their first lines; neighbouring comments are one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value, node.lineno
    block: list[str] = []
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != first + len(block) and block:
            yield "\n".join(block), first
            block = []
        first = first if block else token.start[0]
        block.append(token.string.lstrip("#").strip())
    if block:
        yield "\n".join(block), first


def _holds(where: tuple[str, ...], file: str) -> bool:
    """Return whether a ban holds in a file."""
    return not where or any(file == entry or file.startswith(f"{entry}/") for entry in where)


def _blank(match: re.Match[str]) -> str:
    """The lines of a match without their text, so that lines can still be counted."""
    return "\n" * match[0].count("\n") or " "


def prose_hits(banned: Banned, file: str, text: str, line: int) -> Iterator[Hit]:
    """Banned phrases of a text that begins at a line."""
    text = _ARGUMENT.sub(_blank, _CODE.sub(_blank, text))
    for entry in banned.phrases:
        if not _holds(entry.where, file):
            continue
        for match in entry.pattern.finditer(text):
            word = " ".join(match[0].split()).lower()
            yield Hit(file, line + text.count("\n", 0, match.start()), "prose", word, entry.use)


def name_hits(banned: Banned, file: str, name: str, line: int) -> Iterator[Hit]:
    """Banned words of a name."""
    if name.startswith("test_"):
        yield from prose_hits(banned, file, name.replace("_", " "), line)
        return
    for entry in banned.names:
        if _holds(entry.where, file) and entry.match(name):
            yield Hit(file, line, "identifier", name, entry.use)


def hits(banned: Banned, file: str, source: str) -> list[Hit]:
    """Coined words of a Python file, in the order of its lines.

    Args:
        banned: The list.
        file: Its path in the repository.
        source: Its content.
    """
    tree = ast.parse(source)
    reported = {
        *(
            hit
            for name, line in bound_names(file, tree)
            for hit in name_hits(banned, file, name, line)
        ),
        *(
            hit
            for text, line in texts(source, tree)
            for hit in prose_hits(banned, file, text, line)
        ),
    }
    return sorted(
        (hit for hit in reported if not banned.is_exempt(hit)),
        key=lambda hit: (hit.line, hit.kind, hit.word),
    )


def _root(file: Path) -> Path:
    """The repository of a file."""
    for folder in file.parents:
        if (folder / "pyproject.toml").is_file():
            return folder
    return file.parent


def files_of(paths: Iterable[str]) -> list[Path]:
    """Python files among and below paths, sorted.

    Raises:
        FileNotFoundError: if a path does not exist.
    """
    files = set[Path]()
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist, expected a Python file or a folder")
        files |= set(path.rglob("*.py")) if path.is_dir() else {path}
    return sorted(file.resolve() for file in files)


def check(banned: Banned, paths: Iterable[str]) -> list[Hit]:
    """Coined words of files and of folders' files."""
    return [
        hit
        for file in files_of(paths)
        for hit in hits(banned, file.relative_to(_root(file)).as_posix(), file.read_text())
    ]


def summary(reported: Sequence[Hit]) -> Iterator[str]:
    """Counts per folder, then per word."""
    for title, counts in (
        ("folder", Counter(hit.file.rpartition("/")[0] for hit in reported)),
        ("word", Counter(f"{hit.kind} {hit.word}" for hit in reported)),
    ):
        yield f"hits  {title}"
        yield from (f"{count:<6}{name}" for name, count in counts.most_common())


def main(arguments: Sequence[str]) -> int:
    """Print hits or counts; the exit status."""
    banned = load()
    paths = [argument for argument in arguments if argument != "--summary"]
    reported = check(banned, paths or FOLDERS)
    for line in summary(reported) if "--summary" in arguments else reported:
        print(line)
    return int(bool(reported))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
