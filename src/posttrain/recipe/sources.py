"""Sources of a recipe: YAML files and overrides, with the file and line of every value.

Text is literal: `${...}` is not interpolated. Numbers such as `1e-6` are numbers, and dates stay text.
"""

import copy
import functools
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from posttrain.errors import InputError
from posttrain.recipe.catalogue import recipe_file

_DEEP = re.compile(r"(?:[\[{]\s*){300}")
MAX_VALUES = 100_000
"""Maximum number of values of a recipe, including those repeated by aliases."""
MAX_MIB = 1
"""Maximum size of a recipe file in MiB. YAML is read at less than 1 MiB per second."""
REQUIRED = "???"
"""Placeholder of a value that a recipe needs and does not have. A text after it says what to set."""
_MAX_BITS = 8192
"""Maximum size of a whole number in bits. Python prints at most 4,300 digits, and messages contain values."""

KeyPath = tuple[str, ...]
"""A dotted key, split at its dots."""

_FLOAT = re.compile(
    r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class RecipeLoader(yaml.SafeLoader):
    """YAML in which `1e-6` is a float and `2026-01-01` is text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        if yaml.__with_libyaml__:  # its parser is ten times faster; nodes are made here, within the limit of recursion
            parser = yaml.cyaml.CParser(text)  # type: ignore[attr-defined]
            for name in ("check_event", "peek_event", "get_event"):
                setattr(self, name, getattr(parser, name))

    def construct_yaml_int(self, node: Any) -> int:
        # Numbers in base 60 (`1:30:00`) take quadratic time.
        if len(node.value) > 2 * _MAX_BITS:
            raise ValueError(f"a whole number of {len(node.value):,} characters in line {node.start_mark.line + 1}")
        number: int = super().construct_yaml_int(node)
        if number.bit_length() > _MAX_BITS:
            raise ValueError(f"a whole number of {number.bit_length():,} bits")
        return number

    def construct_text(self, node: Any) -> str:
        text: str = self.construct_scalar(node)
        if any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ValueError("a text with half a character, a lone surrogate")
        return text


# Recipes have the values of JSON. Bytes would become text after `trust` has looked at the texts.
RecipeLoader.yaml_constructors = {
    tag: make
    for tag, make in RecipeLoader.yaml_constructors.items()
    if str(tag).rpartition(":")[2] not in ("binary", "omap", "pairs", "set", "timestamp")
}
RecipeLoader.add_constructor("tag:yaml.org,2002:int", RecipeLoader.construct_yaml_int)
RecipeLoader.add_constructor("tag:yaml.org,2002:str", RecipeLoader.construct_text)


class RecipeDumper(yaml.SafeDumper):
    """Writes YAML that `RecipeLoader` reads back as the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _class in (RecipeLoader, RecipeDumper):
    _class.yaml_implicit_resolvers = {
        first: [
            (tag, pattern)
            for tag, pattern in resolvers
            if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:float")
        ]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass
class Layer:
    """Values from one source, and the origin of every key as text (`bandit.yaml line 3`)."""

    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)
    file: bool = False
    """Whether this layer is a complete file."""

    def part(self, *path: str) -> "Layer":
        """The section `path` as a separate layer. List items are named by their index."""
        value: Any = self.values
        for key in path:
            value = value[int(key)] if isinstance(value, list) else value[key]
        inner = {key[len(path) :]: where for key, where in self.origins.items() if key[: len(path)] == path != key}
        return Layer(value or {}, inner)

    def origin(self, path: KeyPath) -> str | None:
        """The origin of `path`, or of the nearest section around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.origins:
                return self.origins[path[:length]]
        return None


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """A value of a recipe with its path, and all values inside it, depth first. List items are named by their index."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from walk(inner, (*path, str(key)))


def texts(value: Any) -> list[str]:
    """Every text in a value of a recipe that is not empty, without the names of keys."""
    return [text for _, text in walk(value) if text and isinstance(text, str)]


def required_keys(value: Any) -> dict[KeyPath, str]:
    """Keys that have the placeholder `???`, with the text after it, which says what to set."""
    given = {path: text.partition(" ") for path, text in walk(value) if isinstance(text, str)}
    return {path: remedy.strip() for path, (mark, _, remedy) in given.items() if mark == REQUIRED}


def read_file(path: str) -> Layer:
    """The YAML mapping in the file `path`, or in the recipe of that name (see `posttrain.recipe.catalogue`).

    Raises:
        InputError: the file cannot be read. The message names the file and the line of the error.
    """
    file = recipe_file(path)
    path = str(file)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_MIB * 2**20 + 1)
        if len(data) > MAX_MIB * 2**20:
            raise InputError(f"{path} is larger than {MAX_MIB} MiB; name a recipe, or write a smaller one")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a recipe: byte {error.start} is not UTF-8 text; name a YAML file") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    return read_text(text, path)


def read_text(text: str, path: str) -> Layer:
    """Like `read_file`, for text in memory. `path` is its name in messages."""
    try:
        parsed = _parsed(text, path)
        return replace(parsed, values=copy.deepcopy(parsed.values), origins=dict(parsed.origins))
    except RecursionError:
        raise InputError(f"{path}: it is nested too deeply; write a flatter recipe") from None


@functools.lru_cache(maxsize=8)  # a run reads its recipe several times
def _parsed(text: str, path: str) -> Layer:
    try:
        node, origins, value = _document(text, path)
    except yaml.MarkedYAMLError as error:
        mark, lines = error.problem_mark or error.context_mark, text.splitlines()
        line = mark.line if mark is not None else 0
        start = re.match(r"\s*", lines[line]) if line < len(lines) else None
        if start is not None and "\t" in start[0]:
            raise InputError(f"{path} line {line + 1}: a tab is used for indentation; use spaces") from None
        raise InputError(f"{path} line {line + 1} is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if node is None:
        raise InputError(f"{path} is empty; write at least one `key: value` line, or remove the file")
    if not isinstance(value, dict):
        raise InputError(f"{path} line {node.start_mark.line + 1}: a recipe consists of `key: value` lines")
    return Layer(value, origins, file=True)


def read_overrides(words: list[str]) -> list[Layer]:
    """One layer for each of `a.b=c`, `--a.b=c` and `--a.b`, `c`. Values are YAML; an empty value is null."""
    layers = []
    remaining = iter(words)
    for word in remaining:
        key, equals, value = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--"):
            following = next(remaining, None)
            if following is None:
                raise InputError(f"override {word} has no value; write `{key}=value`")
            value = following
        elif not equals:
            raise InputError(f"override {word!r} has no value; write `{word}=value`")
        layers.append(_override(key, value))
    return layers


def merge(layers: list[Layer]) -> Layer:
    """Merge the layers left to right: sections key by key, lists and other values as a whole."""
    origins: dict[KeyPath, str] = {}
    values: dict[str, Any] = {}
    for layer in layers:
        origins |= layer.origins
        values = _over(values, layer, layer.values, ())
    return Layer(values, origins)


def _over(values: dict[str, Any], layer: Layer, changes: dict[str, Any], path: KeyPath) -> dict[str, Any]:
    """`values` updated by `changes`, the section of `layer` at `path`. A placeholder `???` replaces no value."""
    merged = dict(values)
    for key, value in changes.items():
        old, inside = merged.get(key), (*path, key)
        if {type(old), type(value)} == {dict, list}:
            where = layer.origin(inside) or "the recipe"
            raise InputError(f"{where}: {'.'.join(inside)}: given both as a list and as a section; keep one of them")
        if isinstance(old, dict) and isinstance(value, dict):
            merged[key] = _over(old, layer, value, inside)
        elif key not in merged or value != REQUIRED:
            merged[key] = copy.deepcopy(value)
    return merged


def dump_values(values: dict[str, Any]) -> str:
    """YAML text that `read_text` reads back as `values`."""
    return yaml.dump(values, Dumper=RecipeDumper, sort_keys=False, allow_unicode=True, width=120)


def _override(key: str, text: str) -> Layer:
    where = f"override {key}={text}"
    path = tuple(key.split("."))
    if not all(path):
        raise InputError(f"{where}: {key!r} is not a dotted key; write `section.key=value`")
    try:
        _, inside, value = _document(text, where)
    except yaml.YAMLError:
        raise InputError(f"{where}: the value is not YAML; quote it if it is text") from None
    keys = [*(path[:length] for length in range(1, len(path) + 1)), *(path + inner for inner in inside)]
    return Layer(nested(key, value), dict.fromkeys(keys, where))


def nested(key: str, value: Any) -> dict[str, Any]:
    """The nested form of a dotted key: `a.b` and 1 become {"a": {"b": 1}}."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def _document(text: str, where: str) -> tuple[yaml.Node | None, dict[KeyPath, str], Any]:
    """The YAML document in `text`, None if there is none; the origin of every key in it; and its value.

    InputError if its aliases expand to more than MAX_VALUES values, as a few hundred bytes can, if it is nested deeper than
    Python can read, or for YAML that a recipe does not allow.
    """
    too_deep = InputError(f"{where}: it is nested too deeply; write a flatter recipe")
    if _DEEP.search(text):  # before the time of the parser grows with the square of the depth
        raise too_deep
    sizes: dict[int, int] = {}

    def size(node: yaml.Node) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = 0  # an alias that contains itself; `_walk` refuses it
            pairs = isinstance(node, yaml.MappingNode)
            children = [one for pair in node.value for one in pair] if pairs else node.value
            is_text = isinstance(node, yaml.ScalarNode)
            sizes[id(node)] = 1 if is_text else 1 + sum(map(size, children))
        return sizes[id(node)]

    try:
        loader = RecipeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}, None
        if size(node) > MAX_VALUES:
            raise InputError(f"{where}: its aliases expand to more than {MAX_VALUES:,} values; write a smaller recipe")
        return node, dict(_walk(node, (), where, ())), loader.construct_document(node)
    except RecursionError:
        raise too_deep from None
    except (AttributeError, KeyError, ValueError) as error:  # explicit tags, unreadable numbers
        raise InputError(f"{where}: a value cannot be read ({error}); correct it, or quote it if it is text") from None


def _walk(node: yaml.Node, path: KeyPath, file: str, above: tuple[yaml.Node, ...]) -> Iterator[tuple[KeyPath, str]]:
    """Every key under `node` with its origin. Raises `InputError` for YAML that a recipe does not allow."""
    line = f"{file} line {node.start_mark.line + 1}"
    if node in above:
        raise InputError(f"{line}: the alias contains itself")
    if isinstance(node, yaml.SequenceNode):
        for at, child in enumerate(node.value):
            yield (*path, str(at)), f"{file} line {child.start_mark.line + 1}"
            yield from _walk(child, (*path, str(at)), file, (*above, node))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[Hashable, int] = {}
    for key, child in node.value:
        here = f"{file} line {key.start_mark.line + 1}"
        if key.tag == "tag:yaml.org,2002:merge":
            yield from _walk(child, path, file, (*above, node))
            continue
        if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
            raise InputError(f"{here}: {getattr(key, 'value', 'the key')} is not a key; keys are text")
        dotted = ".".join((*path, key.value))
        if key.value in seen:
            raise InputError(f"{here}: {dotted} is also given in line {seen[key.value]}; keep one of them")
        seen[key.value] = key.start_mark.line + 1
        yield (*path, key.value), here
        yield from _walk(child, (*path, key.value), file, (*above, node))
