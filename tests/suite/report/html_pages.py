"""Reads a page as a browser's parser would, far enough to ask what is on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "br", "hr", "img", "input", "path", "circle", "rect", "line"}


@dataclass
class Element:
    """One element with its attributes, its text (that of its children included) and its children."""

    tag: str
    attributes: dict[str, str]
    parent: Element | None = None
    children: list[Element] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return " ".join("".join(self.pieces).split())

    @property
    def classes(self) -> set[str]:
        return set(self.attributes.get("class", "").split())

    def all(self, tag: str = "", cls: str = "") -> list[Element]:
        """Descendants with this tag and class, in document order."""
        found = []
        for child in self.children:
            if (not tag or child.tag == tag) and (not cls or cls in child.classes):
                found.append(child)
            found += child.all(tag, cls)
        return found

    def one(self, tag: str = "", cls: str = "") -> Element:
        (element,) = self.all(tag, cls)
        return element

    def by_id(self, name: str) -> Element:
        (element,) = [e for e in self.all() if e.attributes.get("id") == name]
        return element


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("", {})
        self.open = self.root

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs}, self.open)
        self.open.children.append(element)
        if tag not in VOID:
            self.open = element

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.tag == tag, f"</{tag}> closes <{self.open.tag}> at {self.getpos()}"
        assert self.open.parent is not None
        self.open = self.open.parent

    def handle_data(self, data: str) -> None:
        element: Element | None = self.open
        while element is not None:
            element.pieces.append(data)
            element = element.parent


def read_page(path: Path) -> Element:
    """The document of a page. Fails on elements that are not closed in order."""
    reader = _Reader()
    reader.feed(path.read_text())
    reader.close()
    assert reader.open is reader.root, f"<{reader.open.tag}> is never closed in {path.name}"
    return reader.root
