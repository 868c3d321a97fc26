"""Limits on the work of one rendering of a chat template: a template comes with a model from anywhere, and two short
loops can take hours.

All that a template does costs work, about a nanosecond each: a turn of a loop, a call, a character that is written,
cut, compared or looked through. A rendering has an allowance that grows with the conversation, so that the same input
is taken or refused on every machine; what would make something huge in one step (a width, a product, a power) is
refused before it is made. For the rest there is a time of the thread. Real templates take less than a hundredth of it.
"""

import functools
import re
import time
from collections.abc import Callable
from inspect import isgenerator
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.sandbox
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.visitor import NodeTransformer

# that a rendering has, and more for each character of the conversation
WORK = 4_000_000
WORK_OF_CHARACTER = 1_000
SECONDS = 5.0
CHARACTERS_A_SECOND = 10_000
# work of a turn of a loop, of a call, and of an entry of a list
STEP = 20
CALL = 60
ENTRY = 20
WIDEST = 100_000  # of what a number in a call may ask for
SLOW = 100_000  # characters that a filter which is slow on long texts takes
BITS = 1 << 16  # of a whole number
CHECKED = 256  # steps between two looks at the clock

WIDTHS = ("center", "ljust", "rjust", "zfill")
BANNED = ("translate", "to_bytes", "fromkeys", "format_map", "expandtabs")
LAZY = (
    "length",
    "count",
    "first",
    "last",
    "list",
    "map",
    "select",
    "reject",
    "selectattr",
    "rejectattr",
    "default",
    "d",
    "items",
    "reverse",
    "attr",
    "batch",
    "slice",
)
SHALLOW_TESTS = (
    "defined",
    "undefined",
    "none",
    "mapping",
    "sequence",
    "iterable",
    "string",
    "number",
    "boolean",
    "true",
    "false",
    "callable",
    "integer",
    "float",
    "odd",
    "even",
    "filter",
    "test",
)
SLOW_FILTERS = (
    "urlize",
    "striptags",
    "wordwrap",
    "pprint",
    "xmlattr",
    "wordcount",
    "title",
)
ANY_NUMBER = ("default", "d", "int", "float", "abs")
WIDE_FORMAT = re.compile(r"\d{5}|\*|\{[^{}]*\{")


class TooMuch(SecurityError):
    """A template wants more than a rendering may take."""


class Limits:
    """The work that a rendering has left."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, characters: int) -> None:
        """Begins a rendering of a conversation of some characters."""
        self.left = WORK + WORK_OF_CHARACTER * characters
        self.until = time.thread_time() + SECONDS + characters / CHARACTERS_A_SECOND
        self.steps = 0

    def spend(self, work: int) -> None:
        self.left -= work
        if self.left < 0:
            raise TooMuch(
                "more work than writing a conversation takes: loops, or texts, without end"
            )
        self.steps += 1
        if self.steps % CHECKED == 0:
            self.look()

    def look(self) -> None:
        if time.thread_time() > self.until:
            raise TooMuch("more time than writing a conversation takes")

    def expect(self, size: int, what: str) -> None:
        """Refuses what would be larger than the work that is left, before it is made."""
        if size > self.left:
            raise TooMuch(f"something too large ({what})")

    def width(self, value: Any, what: str) -> None:
        if isinstance(value, int) and abs(value) > WIDEST:
            raise TooMuch(f"something too large ({what} of {WIDEST:,} at most)")

    def weigh(self, value: Any) -> Any:
        """Spends what writing or comparing a value takes, with all that is in it, and returns it."""
        waiting = [value]
        while waiting:
            each = waiting.pop()
            self.spend(size(each))
            if isinstance(each, dict):
                waiting += [*each, *each.values()]
            elif isinstance(each, list | tuple):
                waiting += each
        return value

    def shown(self, value: Any) -> Any:
        """Weighs what is written; a function or a generator is spelt with its address, which differs from run to
        run.
        """
        if (
            isgenerator(value)
            or isinstance(value, BuiltinMethodType | functools.partial)
            or (callable(value) and not isinstance(value, jinja2.Undefined))
        ):
            raise SecurityError(
                "the spelling of a function, which differs from run to run"
            )
        return self.weigh(value)

    def pieces(self, text: Any, count: int, what: str) -> None:
        if isinstance(text, str | bytes):
            self.expect(len(text) * count, what)

    def format(self, text: Any) -> None:
        if WIDE_FORMAT.search(str(text)):
            raise TooMuch("something too large (a width of a format)")


def size(value: Any) -> int:
    """Returns the work of taking a value in hand, without what is in it."""
    if isinstance(value, str | bytes):
        return len(value) + 1
    if isinstance(value, list | tuple | dict | range):
        return ENTRY * (len(value) + 1)
    return ENTRY


class Spending(NodeTransformer):
    """Has every loop, macro, join, cut and comparison of a template say what it takes."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.test is not None:
            node.test = nodes.And(_step(0), node.test)
        return _stepping(node)

    def visit_Macro(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return _stepping(node)

    visit_CallBlock = visit_Block = visit_Macro

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Concat([_filtered(each, "_shown") for each in node.nodes])

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_sized") if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            if not isinstance(operand.expr, nodes.Const):
                constant = isinstance(node.expr, nodes.Const) and operand.op not in (
                    "in",
                    "notin",
                )
                operand.expr = (
                    operand.expr if constant else _filtered(operand.expr, "_weighed")
                )
        return node


def _filtered(node: nodes.Expr, name: str) -> nodes.Expr:
    if isinstance(node, nodes.Const):
        return node
    return nodes.Filter(node, name, [], [], None, None)


def _step(characters: int) -> nodes.Expr:
    return nodes.Filter(nodes.Const(characters), "_step", [], [], None, None)


def _stepping(node: Any) -> nodes.Node:
    characters = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
    node.body.insert(0, nodes.ExprStmt(_step(characters)))
    return node


class LimitedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a rendering takes no more than its Limits."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        self.limits = Limits()
        # Between what stands a text that is marked, and whether the template compiled last marks any.
        self.marks = ("", "")
        self.used = False
        super().__init__(finalize=self.limits.shown, **options)
        # What differs from run to run makes two preparations of one input differ.
        del self.globals["lipsum"], self.filters["random"]

    def limit(self) -> None:
        """Puts all filters and tests, once they are there, under the limits."""
        self.filters = {
            name: self._limited(name, function)
            for name, function in self.filters.items()
        }
        self.tests = {
            name: self._limited_test(name, test) for name, test in self.tests.items()
        }
        # With a context, so that nothing of it is computed while a template is compiled.
        self.filters["_step"] = self._spend_step
        self.filters["_shown"] = jinja2.pass_context(
            lambda context, value: self.limits.shown(value)
        )
        self.filters["_weighed"] = jinja2.pass_context(
            lambda context, value: self.limits.weigh(value)
        )
        self.filters["_sized"] = self._spend_size

    @jinja2.pass_context
    def _spend_step(self, context: Any, n: int) -> bool:
        self.limits.spend(STEP + n)
        return True

    @jinja2.pass_context
    def _spend_size(self, context: Any, value: Any) -> Any:
        self.limits.spend(size(value))
        return value

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        tree = Spending().visit(super()._parse(source, name, filename))
        tree.set_lineno(1)
        return tree.set_environment(self)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers:
            if left.bit_length() * max(right, 0) > BITS:
                raise TooMuch("something too large (a power)")
        elif operator == "*" and numbers:
            if left.bit_length() + right.bit_length() > BITS:
                raise TooMuch("something too large (a product)")
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            count, many = (left, right) if isinstance(left, int) else (right, left)
            self.limits.expect(size(many) * count, "a product")
        elif operator == "%" and isinstance(left, str):
            self.limits.format(left)
            self.limits.weigh(right)
        elif operator == "+":
            self.limits.spend(size(left) + size(right))
        result = super().call_binop(context, operator, left, right)
        self.limits.spend(size(result))
        return result

    def call(self, context: Any, obj: Any, *args: Any, **named: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)
        owner = getattr(method, "__self__", None)
        name = getattr(method, "__name__", "")
        self.limits.spend(CALL)
        if isinstance(
            owner, str | bytes | int | float | list | tuple | dict
        ) or owner in (
            dict,
            str,
            int,
            bytes,
        ):
            args = self._checked(owner, name, args)
            self.limits.spend(size(owner) // 8)
        result = super().call(context, obj, *args, **named)
        self.limits.spend(size(result))
        return result

    def _checked(self, owner: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a method of a text, a number, a list; SecurityError where it would make something huge."""
        limits = self.limits
        if name in BANNED:
            raise SecurityError(f"the method {name}")
        if name in WIDTHS and args:
            limits.width(args[0], "a width")
        elif name == "format":
            limits.format(owner)
            limits.weigh(args)
        elif name == "replace" and len(args) > 1:
            _expect_replaced(limits, owner, *args[:2])
        elif name == "join" and args:
            args = (list(args[0]),)
            limits.pieces(owner, len(args[0]), "a join")
        return args

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def filtered(*args: Any, **named: Any) -> Any:
            # Behind what Jinja passes itself.
            value, *rest = args[1:] if hasattr(function, "jinja_pass_arg") else args
            self.limits.look()
            others = [*rest, *named.values()]
            self._check_filter(name, value, others)
            if name == "join" and isgenerator(value):
                value = list(value)
                args = (
                    (args[0], value, *rest)
                    if hasattr(function, "jinja_pass_arg")
                    else (value, *rest)
                )
                self._check_filter(name, value, others)
            result = function(*args, **named)
            self.limits.spend(CALL + size(result))
            return result

        return filtered

    def _check_filter(self, name: str, value: Any, rest: list[Any]) -> None:
        limits = self.limits
        if name in LAZY:
            limits.spend(size(value))
        else:
            # All of a value is written or compared.
            limits.shown(value) if not isgenerator(value) else limits.spend(STEP)
        for each in rest:
            limits.spend(size(each))
            if name not in ANY_NUMBER:
                limits.width(each, f"a number in {name}")
        texts = [each for each in rest if isinstance(each, str)]
        if name == "replace" and len(texts) > 1:
            _expect_replaced(limits, str(value), *texts[:2])
        elif name == "format":
            limits.format(value)
        elif name == "join" and texts:
            limits.pieces(
                texts[0], len(value) if hasattr(value, "__len__") else 0, "a join"
            )
        elif (
            name == "sum"
            and any(
                isinstance(each, list | tuple | str)
                for each in rest[1:] + rest[:1]
                if each is not value
            )
            and not (texts and len(rest) == 1)
        ):
            raise TooMuch("something too large (a sum of lists)")
        elif name == "tojson" or name == "indent":
            for text in texts:
                limits.pieces(
                    text,
                    str(value).count("\n") + 1 if name == "indent" else size(value),
                    name,
                )
        if name in SLOW_FILTERS and isinstance(value, str) and len(value) > SLOW:
            raise TooMuch(f"{name} of more than {SLOW:,} characters")

    def _limited_test(self, name: str, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)
        def tested(*args: Any, **named: Any) -> Any:
            self.limits.spend(STEP)
            if name not in SHALLOW_TESTS:
                for each in (
                    *args[bool(hasattr(function, "jinja_pass_arg")) :],
                    *named.values(),
                ):
                    self.limits.weigh(each)
            return function(*args, **named)

        return tested


def _expect_replaced(limits: Limits, text: Any, old: Any, new: Any) -> None:
    found = text.count(old) if old else len(text) + 1
    limits.pieces(new, found, "a replacement")
