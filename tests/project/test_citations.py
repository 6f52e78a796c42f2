"""Citations of the specification and links between documents lead to something that exists.

One form of citation is allowed, so that this test can follow each: ``specification, section 4.2``,
``specification, sections 5.2 and 5.3``, ``specification, section 6, step 3``, ``pitfall 17``,
``pitfalls 13 and 16``, and in names of tests ``test_pitfall_17_``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = ("dsv4", "tests", "tools", "examples")
SPECIFICATION = ROOT / "docs" / "specification.md"
GLOSSARY = ROOT / "docs" / "glossary.md"

_NUMBER = r"\d+(?:\.\d+)*"
_MORE = r"(?:, and |, | and | to )"
_SECTIONS = re.compile(
    rf"(?P<sections>{_NUMBER}(?:{_MORE}{_NUMBER}\b)*)"
    rf"(?:, steps? (?P<steps>\d+(?:{_MORE}\d+\b)*))?"
)
_CITED = re.compile(r"\b[Ss]pecification, sections? " + _SECTIONS.pattern)
_CITED_INSIDE = re.compile(r"\b[Ss]ections? " + _SECTIONS.pattern)
_PITFALLS = re.compile(rf"\b[Pp]itfalls? (?P<pitfalls>\d+(?:{_MORE}\d+\b)*)")
_NAMED = re.compile(r"pitfalls?(?P<pitfalls>(?:_\d+)+)_")
# What is left of these after the allowed citations are taken out is a citation in another form.
_OTHER_FORMS = re.compile(
    r"§|\b[Ss]ec(?:tions?|s?\.) ?\d[\d.]*|\b[Ss]pecification(?:'s)?,? [\d(][\d.]*"
    r"|(?i:\b(?:trap|pitfall)s? ?[#(]?[a-z]?\d+)|(?i:trap(?:_[a-z]?\d+)+)|\bT\d{1,2}\b"
)
_COMMENT_BREAK = re.compile(r"\s*\n\s*(?:#+ |> )?\s*")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)
_ANCHOR = re.compile(r'<a id="([^"]+)"></a>')


@dataclass(frozen=True)
class Specification:
    """The sections and pitfalls that can be cited.

    Attributes:
        steps: The numbered steps of each section, by its number.
        pitfalls: Numbers of the pitfalls.
    """

    steps: dict[str, frozenset[int]]
    pitfalls: frozenset[int]

    @classmethod
    def read(cls, text: str) -> Specification:
        """The sections and pitfalls of a document in the form of docs/specification.md."""
        pieces = re.split(rf"^#{{2,4}} ({_NUMBER})\.? .+$", text, flags=re.MULTILINE)
        steps = {
            number: frozenset(map(int, re.findall(r"^(\d+)\. ", body, re.MULTILINE)))
            for number, body in zip(pieces[1::2], pieces[2::2], strict=True)
        }
        pitfalls = map(int, re.findall(r"\*\*Pitfall (\d+)\. ", text))
        return cls(steps, frozenset(pitfalls))


@cache
def specification() -> Specification:
    return Specification.read(SPECIFICATION.read_text())


def problems(text: str, known: Specification, *, inside: bool = False) -> list[str]:
    """Citations that lead nowhere or have another form; ``inside`` the specification itself."""
    text = _COMMENT_BREAK.sub(" ", text)
    result = []
    cited = _CITED_INSIDE if inside else _CITED
    for match in cited.finditer(text):
        result += _section_problems(match, known)
    for match in (*_PITFALLS.finditer(text), *_NAMED.finditer(text)):
        numbers = map(int, re.findall(r"\d+", match["pitfalls"]))
        result += [
            f"there is no pitfall {n}: {match[0]!r}" for n in numbers if n not in known.pitfalls
        ]
    rest = text
    for pattern in (_CITED, cited, _PITFALLS, _NAMED):
        rest = pattern.sub(" ", rest)
    for match in _OTHER_FORMS.finditer(rest):
        around = rest[max(0, match.start() - 20) : match.end() + 20]
        result.append(f"{match[0]!r} in {around!r} is no citation in the allowed form")
    return result


def _section_problems(match: re.Match[str], known: Specification) -> Iterator[str]:
    sections = re.findall(_NUMBER, match["sections"])
    for section in sections:
        if section not in known.steps:
            yield f"there is no section {section}: {match[0]!r}"
    for step in map(int, re.findall(r"\d+", match["steps"] or "")):
        if step not in known.steps.get(sections[-1], ()):
            yield f"section {sections[-1]} has no step {step}: {match[0]!r}"


def slug(heading: str) -> str:
    """GitHub's anchor of a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(text: str) -> list[str]:
    """Explicit anchors of a document, then those of its headings."""
    text = _FENCE.sub("", text)
    result = _ANCHOR.findall(text)
    count: dict[str, int] = {}
    for heading in _HEADING.findall(text):
        name = slug(heading)
        seen = count.setdefault(name, 0)
        count[name] += 1
        result.append(f"{name}-{seen}" if seen else name)
    return result


def link_problems(document: Path, text: str) -> list[str]:
    """Relative links of a document whose file or anchor does not exist."""
    result = []
    for target in _LINK.findall(_FENCE.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            result.append(f"{document.name}: {target} is no file")
        elif anchor and anchor not in anchors(text if file == document else file.read_text()):
            result.append(f"{document.name}: {target} has no such anchor")
    return result


def citing_files() -> list[Path]:
    """Every file that may cite, except this one, which has broken citations as examples."""
    code = [p for folder in CODE for p in (ROOT / folder).rglob("*.py")]
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return sorted(p for p in (*code, *documents) if p != Path(__file__).resolve())


def documents() -> list[Path]:
    folders = (ROOT / name for name in ("docs", "examples", "notes", "results"))
    return sorted([*ROOT.glob("*.md"), *(p for folder in folders for p in folder.rglob("*.md"))])


def test_every_citation_leads_to_a_section_or_a_pitfall() -> None:
    result = [
        f"{file.relative_to(ROOT)}: {problem}"
        for file in citing_files()
        for problem in problems(file.read_text(), specification(), inside=file == SPECIFICATION)
    ]
    assert not result, "\n".join(result)


@pytest.mark.parametrize("document", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file_and_an_anchor(document: Path) -> None:
    result = link_problems(document, document.read_text())
    assert not result, "\n".join(result)


def test_every_section_and_pitfall_has_its_anchor() -> None:
    text = SPECIFICATION.read_text()
    names = _ANCHOR.findall(text)
    expected = [f"s{n}" for n in specification().steps]
    expected += [f"pitfall-{n}" for n in sorted(specification().pitfalls)]
    assert sorted(names) == sorted(expected)
    for number in specification().steps:
        assert re.search(rf'<a id="s{re.escape(number)}"></a>\n#+ {re.escape(number)}\.? ', text)
    for number in specification().pitfalls:
        assert f'<a id="pitfall-{number}"></a>**Pitfall {number}. ' in text


def test_pitfalls_are_numbered_without_gaps() -> None:
    numbers = re.findall(r"\*\*Pitfall (\d+)\. ", SPECIFICATION.read_text())
    assert numbers == [str(n) for n in range(1, len(numbers) + 1)]


def test_the_glossary_is_in_alphabetical_order_and_every_term_has_a_home() -> None:
    entries = [e for e in GLOSSARY.read_text().split("\n\n") if e.startswith("**")]
    terms = [entry.removeprefix("**").partition("**")[0] for entry in entries]
    assert len(terms) > 50
    assert terms == sorted(set(terms), key=lambda term: re.findall(r"[a-z0-9]+", term.lower()))
    for entry in entries:
        assert _LINK.search(entry), f"{entry[:60]!r} names no file"


EXAMPLE = Specification.read(
    "## 4. Attention\n### 4.2 Forward\n1. One.\n2. Two.\n## 5. Next\n"
    "**Pitfall 1. A.**\n**Pitfall 2. B.**"
)


@pytest.mark.parametrize(
    "text",
    [
        "(specification, section 4.2)",
        "Specification, sections 4 and 5. More.",
        "specification, sections 4, 4.2 and 5",
        "# by specification,\n# section 4.2, steps 1 to 2",
        "specification, section 4.2, layers 0 to 9",
        "pitfall 1, and pitfalls 1 and 2: both",
        "def test_pitfalls_1_2_both(): ...",
        "the section of an ELF file, a trap for the unwary, T tokens, spec = 3, 17 pitfalls",
    ],
)
def test_good_citations_pass(text: str) -> None:
    assert problems(text, EXAMPLE) == []


@pytest.mark.parametrize(
    "text",
    [
        "specification, section 4.3",
        "specification, sections 4 and 6",
        "specification, section 4.2, step 3",
        "specification, section 5, step 1",
        "pitfall 3",
        "pitfalls 1 and 3",
        "def test_pitfall_3_missing(): ...",
        "specification section 4.2",
        "the specification's section 4",
        "(section 4.2)",
        "from specification 4.2",
        "§4.2",
        "sec. 4.2",
        "trap 1",
        "trap T1",
        "(T1)",
        "pitfall P1",
        "pitfall #1",
        "def test_trap_t1_missing(): ...",
    ],
)
def test_broken_citations_and_other_forms_are_found(text: str) -> None:
    assert len(problems(text, EXAMPLE)) == 1


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text('# A title: "x"\n<a id="here"></a>\n# Twice\n# Twice\n')
    good = "[a](other.md#a-title-x) [b](other.md#here) [c](other.md#twice-1) [d](https://x.y/z#q)"
    own = "\n# Own\n[e](#own)\n```\n[f](nowhere.md)\n```\n"
    document = tmp_path / "document.md"
    document.write_text(good + own)
    assert link_problems(document, good + own) == []
    for broken in ("[a](no.md)", "[a](other.md#no)", "[a](#no)"):
        assert len(link_problems(document, broken)) == 1
