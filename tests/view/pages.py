"""Pages as a browser reads them."""

from html.parser import HTMLParser

VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of styles; every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> where another was open"

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self.text += data

    def all(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]

    def check_self_contained(self) -> None:
        """No script, no request to anywhere."""
        assert {tag for tag, _ in self.tags}.isdisjoint({"script", "link", "iframe", "object", "embed", "form", "base"})
        for tag, attrs in self.tags:
            assert not any(name.startswith("on") for name in attrs), attrs
            for name in ("src", "href", "srcset", "action", "data"):
                value = attrs.get(name)
                assert value is None or value.startswith(("data:image/svg+xml;base64,", "#")), (tag, value)
            assert "url(" not in (attrs.get("style") or "")
        assert len(self.all("style")) == 1
        (policy,) = [attrs["content"] for attrs in self.all("meta") if attrs.get("http-equiv")]
        assert "default-src 'none'" in policy
