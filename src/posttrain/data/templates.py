"""Chat templates, which come with models: limits of what they compute, and the tokens of the text that they render.

`limit_chat_templates` makes transformers render with `LimitedEnvironment`. Loops, calls, filters, operators and outputs
spend from a budget by the size of what they process, before they process it. Nothing is timed, so a conversation is
rendered or refused on every machine alike.

Only the chat template writes control tokens. The text of a control token inside a message stays text: `marked` breaks it
with a mark before the template is applied, and `TextEncoder.encode` removes the mark. Other tokens of the tokenizer, such
as `<tool_call>` in Qwen, are encoded wherever their text is. A template that deletes text inside of messages could still
join a control token. No published one is known to.

The later parts of a text are encoded as its continuation, because SentencePiece tokenizers put a space before a text.
"""

import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2.sandbox
from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, MacroRef, operators
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace

from posttrain.errors import InputError
from posttrain.images import MARK as IMAGE
from posttrain.images import mark

MARK = "\ufdd0"
"""Breaks the text of a control token. A noncharacter of Unicode; where a message contains it, it is doubled."""
_ESCAPED = "\\ufdd0"
_SINGLE = re.compile(f"(?<!{MARK}){MARK}(?!{MARK})")
_THINKING = frozenset({"<think>", "</think>"})
"""Tokens that answers contain as text, and that end no turn. They stay tokens even if the tokenizer calls them special."""
_PLAIN = {"role", "content"}
_REMEMBERED = 4_000_000
"""Characters of the messages whose tokens are kept."""
_TAIL = 200
"""Number of characters of the text before a part that can influence its tokens."""


class TextEncoder:
    """Encodes rendered text with a fast tokenizer."""

    def __init__(self, tokenizer: Any, control: Collection[int]) -> None:
        """`control`: ids of added tokens that structure conversations, besides those that the tokenizer calls special."""
        self.tokenizer = tokenizer
        self._added = tokenizer.added_tokens_decoder
        self.control = frozenset(
            number
            for number, token in self._added.items()
            if (token.special or number in control) and token.content not in _THINKING
        )
        """Ids of control tokens."""
        self._control = either([_ESCAPED, *(self._added[number].content for number in self.control)])
        self._normalizer = tokenizer.backend_tokenizer.normalizer

    # -- messages -----------------------------------------------------------------------------------------------------

    def marked(self, value: Any) -> Any:
        """Return a message, a tool or a text with a mark in every control token that its texts contain."""
        if isinstance(value, str) and IMAGE.search(value):
            return "".join(mark(one) if n % 2 else self.marked(one) for n, one in enumerate(IMAGE.split(value)))
        if isinstance(value, str):
            return self._mark(value) if MARK in value or self._has_control(value) else value
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        return [self.marked(item) for item in value] if isinstance(value, list | tuple) else value

    def _has_control(self, text: str) -> bool:
        """Whether the tokenizer would find a control token in `text`, before or after it normalizes the text."""
        if self._control.search(text):
            return True
        if self._normalizer is None or (text.isascii() and not self._changes_ascii):
            return False
        return self._control.search(self._normalizer.normalize_str(text)) is not None

    @cached_property
    def _changes_ascii(self) -> bool:
        return "Aa" not in self._normalizer.normalize_str("Aa")

    def _mark(self, text: str) -> str:
        marked, count = text.replace(MARK, MARK * 2), 1
        while count:
            marked, count = self._control.subn(_broken, marked)
        if any(map(self._has_control, _parts(marked))):
            # Normalization makes a control token of other characters.
            return MARK.join(text)
        return marked

    @staticmethod
    def unescaped(rendered: str) -> str:
        """Return rendered text in which a template has escaped the marks, as in ASCII JSON."""
        return rendered.replace(_ESCAPED, MARK)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def encode(self, text: str, after: str = "") -> list[int]:
        """Return the token ids of rendered text that continues the rendered text `after`."""
        if MARK not in text:
            return self._continued(text, after)
        ids: list[int] = []
        for part in self._tokens.split(text):
            plain = self._plain(part) if MARK in part and not self._contextual else None
            if plain is not None:
                ids += plain
            else:
                for piece in _parts(part):
                    ids += self._continued(piece, after)
                    after = piece or after
            after = part or after
        return ids

    @cached_property
    def _tokens(self) -> re.Pattern[str]:
        special = {token.content for token in self._added.values() if token.special}
        return either(special.union(self._added[number].content for number in self.control))

    @cached_property
    def _added_texts(self) -> re.Pattern[str]:
        return either(token.content for token in self._added.values())

    def _plain(self, part: str) -> list[int] | None:
        """The tokens of text without any special token; None if the vocabulary has the control token as a word."""
        ids = self._ids("".join(_parts(part)), split_special_tokens=True)
        return None if self.control.intersection(ids) else ids

    def _ids(self, text: str, **settings: bool) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, **settings)["input_ids"]

    @cached_property
    def _contextual(self) -> bool:
        """Whether the tokens of a text depend on the text before it, other than by merges across the border."""
        if any(token.rstrip for token in self._added.values()):
            return True
        starts = ["\n", *[self._added[number].content for number in sorted(self.control)[:1]]]
        texts = ("a b", " a", "0", "\n<")
        return any(
            self._ids(start + text) != [*self._ids(start), *self._ids(text)]
            for start in starts
            for text in texts
            if start != text[:1]
        )

    def _continued(self, text: str, after: str) -> list[int]:
        if not (text and after and self._contextual):
            return self._ids(text)
        tail = after[-_TAIL:]
        starts = [match.start() for match in self._added_texts.finditer(tail)]
        # The actual text before is replaced only if a token would extend across the border.
        for start in (tail[starts[-1] if starts else -16 :], "\n", "x", "0"):
            before, ids = self._ids(start), self._ids(start + text)
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return self._ids(text)


class RememberedTokens:
    """The tokens of plain messages, which the episodes of a group share, computed once."""

    def __init__(self, tokenizer: Any) -> None:
        # The tokens of the same messages change with the date, or with the images that the tokenizer has.
        self._repeats = "strftime_now" not in tokenizer.get_chat_template() and not hasattr(tokenizer, "images")
        self._tokens: dict[tuple[Any, ...], list[int]] = {}
        self._characters = 0

    def __call__(
        self, messages: Sequence[Any], tools: Sequence[Any], key: tuple[Any, ...], tokens: Callable[[], list[int]]
    ) -> list[int]:
        """Return `tokens()` for these messages and `key`, all that they depend on besides `tools`."""
        plain = all(m.keys() == _PLAIN and all(type(value) is str for value in m.values()) for m in messages)
        if tools or not (plain and self._repeats):
            return tokens()
        key = (*key, *((message["role"], message["content"]) for message in messages))
        found = self._tokens.get(key)
        if found is None:
            self._characters += sum(len(message["content"]) for message in messages)
            if self._characters > _REMEMBERED:
                self._tokens, self._characters = {}, 0
            found = self._tokens[key] = tokens()
        return list(found)


def either(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of `texts`, longer ones first, as group 1; nothing if there are none."""
    return re.compile("(" + ("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)") + ")")


def _broken(match: re.Match[str]) -> str:
    if len(match[0]) == 1:
        raise InputError(
            f"a message contains {match[0]!r}, which is a special token of the tokenizer and cannot be encoded as text; "
            "remove it from the message, or from the special tokens of the tokenizer"
        )
    return f"{match[0][0]}{MARK}{match[0][1:]}"


def _parts(marked: str) -> list[str]:
    """The parts between marks, with doubled marks as they were written."""
    return [part.replace(MARK * 2, MARK) for part in _SINGLE.split(marked)]


BUDGET = 3_000_000
"""Units of one rendering: one for each operation, element, and run of a short body, and one for each `_CHARACTERS` characters."""
LONGEST = 128 * 1024
"""Maximum number of characters of a template. The longest published ones have a tenth of it."""
_CHARACTERS = 16
_NODES = 8
"""Parts of the body of a loop or macro for each unit."""
_MOST_BITS = 4_096
_SHALLOW = {
    *("abs", "attr", "batch", "count", "d", "default", "first", "float", "int", "items", "last"),
    *("length", "list", "map", "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr", "slice"),
}
"""Filters that do not read what is nested in their value."""
_SLOW = ("dictsort", "groupby", "sort", "title", "unique")
"""Filters that take several times as long as others for each element or character."""
_REMOVED = ("pprint", "striptags", "sum", "urlize", "wordwrap", "xmlattr")
"""Filters whose cost is not proportional to the sizes of their values. No published template uses them."""
_COMPARING = (
    *("!=", "<", "<=", "==", ">", ">="),
    *("eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower"),
)
_MULTIPLYING = ("expandtabs", "join", "replace", "translate")
"""Methods of texts whose result can have the product of the sizes of their arguments."""


def _call(method: str, node: Any) -> nodes.Call:
    """The call of a method of the environment with the value of `node`."""
    return nodes.Call(nodes.EnvironmentAttribute(method), [node], [], None, None)


def _charged(body: list[nodes.Node]) -> list[nodes.Node]:
    """The body of a loop or macro, which spends for its length each time that it runs."""
    length = sum(1 for part in body for _ in part.find_all(nodes.Node))
    return [nodes.ExprStmt(_call("spend", nodes.Const(length // _NODES))), *body]


class _Code(CodeGenerator):
    """Python code of a template, in which operators that Jinja does not intercept spend too."""

    def _measured(self, node: nodes.Node, frame: Frame) -> None:
        self.write("environment.measured(")
        self.visit(node, frame)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        counted, body = _call("iterated", node.iter), _charged(node.body)
        super().visit_For(nodes.For(node.target, counted, body, node.else_, node.test, node.recursive), frame)

    def macro_body(self, node: nodes.Macro | nodes.CallBlock, frame: Frame) -> tuple[Frame, MacroRef]:
        node.body = _charged(node.body)
        return super().macro_body(node, frame)

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        texts = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        self.writeline(f"environment.spend({1 + texts // _CHARACTERS})", node)
        super().visit_Output(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("str_join((")
        for child in node.nodes:
            self._measured(child, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(")
        self._measured(node.expr, frame)
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        self.write(f" {operators[node.op]} ")
        self._measured(node.expr, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        pairs = [nodes.Pair(_call("measured", pair.key), pair.value) for pair in node.items]
        super().visit_Dict(nodes.Dict(pairs), frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        sliced = isinstance(node.arg, nodes.Slice)
        self.write("environment.copied(" if sliced else "(")
        super().visit_Getitem(node, frame)
        self.write(")")


class _Rendering(jinja2.Template):
    """A template whose renderings start with a full budget."""

    def new_context(self, *args: Any, **keywords: Any) -> Context:
        self.environment.left.units = BUDGET  # type: ignore[attr-defined]
        return super().new_context(*args, **keywords)


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of chat templates with a budget for each rendering. TemplateRuntimeError where it is spent."""

    code_generator_class = _Code
    template_class = _Rendering
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.left = threading.local()
        self.optimized = False  # constants would be computed when the template is compiled, without a budget
        self.finalize = pass_context(lambda _, value: self.measured(value))
        del self.globals["lipsum"]
        for name in _REMOVED:
            del self.filters[name]

    def from_string(self, source: Any, *args: Any, **keywords: Any) -> jinja2.Template:
        """The compiled template. TemplateRuntimeError if it is too long."""
        if len(source) > LONGEST:
            raise TemplateRuntimeError(f"the template has more than {LONGEST:,} characters")
        self.filters = {name: self._limited(name, function) for name, function in self.filters.items()}
        self.tests |= {name: self._limited(name, self.tests[name]) for name in _COMPARING}
        return super().from_string(source, *args, **keywords)

    def spend(self, units: int) -> None:
        """Take `units` from the budget of this rendering."""
        self.left.units = getattr(self.left, "units", BUDGET) - units
        if self.left.units < 0:
            raise TemplateRuntimeError("rendering takes more operations or longer texts than a chat template needs")

    def measured(self, value: Any) -> Any:
        """`value`, after the budget is charged for all that is in it, once for each time that it is there."""
        inner = [value]
        while inner:
            one = inner.pop()
            self.spend(
                1 + (len(one) // _CHARACTERS if isinstance(one, str) else len(one) if isinstance(one, range) else 0)
            )
            one = one._Namespace__attrs if isinstance(one, Namespace) else one
            if isinstance(one, Mapping):
                inner += one.keys()
                inner += one.values()
            elif isinstance(one, Collection) and not isinstance(one, str | bytes | range):
                inner += one
        return value

    def copied(self, value: Any) -> Any:
        """`value`, after the budget is charged for its length."""
        self.spend(1 + (len(value) // _CHARACTERS if hasattr(value, "__len__") else 0))
        return value

    def iterated(self, value: Any) -> Any:
        """`value`, of which each element costs one unit."""
        if not hasattr(value, "__len__"):
            return self._counted(value)
        self.spend(len(value))
        return value

    def _counted(self, values: Any) -> Iterator[Any]:
        for value in values:
            self.spend(1)
            yield value

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, self.measured(argument) if isinstance(argument, tuple) else argument)

    def call(self, context: Context, function: Any, /, *args: Any, **keywords: Any) -> Any:
        self.spend(5)
        if isinstance(function, LoopContext):
            args = tuple(map(self.iterated, args))
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, Collection):
            size = sum(map(self._size, (*args, *keywords.values())))
            if name in ("count", "index"):
                self.measured(owner)
            if isinstance(owner, str):
                size = (len(owner) + 1) * (size + 1) if name in _MULTIPLYING else len(owner) + size
            self.spend(size // _CHARACTERS)
        return self.copied(super().call(context, function, *args, **keywords))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and type(left) is type(right) is str:  # by far the most frequent
            self.spend(1 + (len(left) + len(right)) // _CHARACTERS)
            return left + right
        self.spend(1)
        if operator == "*" and isinstance(left, int) and not isinstance(right, int | float):
            left, right = right, left
        if operator == "%" and isinstance(left, str):
            self._format(left, right if isinstance(right, tuple) else (right,))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 1) if operator == "**" else 1) + right.bit_length()
            if bits > _MOST_BITS:
                raise TemplateRuntimeError("a number of the template is too large")
        elif hasattr(left, "__len__"):
            times = right if operator == "*" and isinstance(right, int) else 1
            self.spend((len(left) * max(times, 0) + (len(right) if hasattr(right, "__len__") else 0)) // _CHARACTERS)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **keywords: Any) -> str:
            self._format(value.__self__, (*args, *keywords.values()))
            return wrapped(*args, **keywords)

        return limited

    def _size(self, value: Any) -> int:
        """Characters and elements of an argument; a number counts as its value, since it may be a width or a count."""
        before = getattr(self.left, "units", BUDGET)
        self.measured(value)
        return abs(value) if isinstance(value, int) else (before - self.left.units) * _CHARACTERS

    def _format(self, form: str, values: Any) -> None:
        """Charge the budget for a text of `values` in the format `form`, which may name widths."""
        widths = [int(digits) if len(digits) < 10 else BUDGET * _CHARACTERS for digits in re.findall(r"\d+", form)]
        if re.search(r"\*|:[^{}]*\{", form):  # widths among the values
            widths += [value for value in values if isinstance(value, int)]
        fields = form.count("%") + form.count("{")
        before = getattr(self.left, "units", BUDGET)
        self.measured(values)
        size = max(widths, default=0) + (before - self.left.units) * _CHARACTERS
        self.spend((len(form) + fields * size) // _CHARACTERS)

    def _limited(self, name: str, function: Any) -> Callable[..., Any]:
        """The filter or test `function`, which spends for its value, its arguments and its result."""
        special = getattr(function, "jinja_pass_arg", None)  # its first argument is a context

        def limited(*args: Any, **keywords: Any) -> Any:
            value, *options = (*(args[1:] if special else args), *keywords.values())
            (self.copied if name in _SHALLOW else self.measured)(value)
            if name in _SLOW and hasattr(value, "__len__"):
                self.spend(2 * len(value) // (_CHARACTERS if isinstance(value, str) else 1))
            size = 0 if name in ("d", "default") else sum(map(self._size, options))
            if name == "format":
                self._format(str(value), options)
            elif name in ("indent", "join", "replace", "tojson"):
                size *= 1 + (len(value) if hasattr(value, "__len__") else 0)
            self.spend(size // _CHARACTERS)
            result = function(*args, **keywords)
            return self.iterated(result) if isinstance(result, Iterator) else self.copied(result)

        limited.jinja_pass_arg = special  # type: ignore[attr-defined]
        return limited


def limit_chat_templates() -> None:
    """Make transformers render chat templates with a budget, from now on in this process."""
    from transformers.utils import chat_template_utils as utilities

    if utilities.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        utilities.ImmutableSandboxedEnvironment = LimitedEnvironment  # type: ignore[misc]
        utilities._compile_jinja_template.cache_clear()
