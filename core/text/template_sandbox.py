"""The environment chat templates run in: that of `transformers`, in Jinja's immutable sandbox, with limits.

What model authors may count on: loop controls, trimmed blocks, `tojson` that leaves HTML characters alone,
`raise_exception`, and a `generation` block that changes nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mvllm.core.errors import TemplateError
from mvllm.core.text.template_limits import (
    SIZE_BEFORE,
    Budget,
    check_operator,
    listed,
    measured,
    require_size,
    spend,
)
from mvllm.core.text.template_metering import Metering, TemplateHooks

MAX_SOURCE = 100_000
"""Characters of a template's source."""

_MAX_MESSAGE = 2_000
_REMOVED_FILTERS = ("random", "urlize", "wordwrap", "xmlattr")
_REMOVED_METHODS = frozenset({"expandtabs", "translate", "maketrans", "to_bytes", "from_bytes"})


class CompiledTemplate:
    """A template ready to render, in any thread. Immutable."""

    def __init__(self, template: jinja2.Template, literals: frozenset[str], loops_over_content: bool) -> None:
        self._template = template
        self.literals = literals
        """The strings that the template can look for in its variables."""
        self.loops_over_content = loops_over_content
        """Whether it takes a message's content apart into a list of parts."""

    def render(self, variables: Mapping[str, Any], clock: Callable[[], float]) -> str:
        """Raises TemplateError: the template failed, refused its input or exceeded a limit."""
        chunks: list[str] = []
        length = 0
        with _limited(clock):
            for chunk in self._template.generate(variables):
                length += len(chunk)
                require_size(length)
                chunks.append(chunk)
        return "".join(chunks)


@functools.lru_cache(maxsize=16)
def compile_template(source: str, clock: Callable[[], float]) -> CompiledTemplate:
    """Raises TemplateError: the source is too long or not a template."""
    if len(source) > MAX_SOURCE:
        raise TemplateError(
            f"the chat template has {len(source)} characters; at most {MAX_SOURCE} are accepted"
        )
    with _limited(clock):
        tree = _ENVIRONMENT.parse(source)
        names = {node.attr for node in tree.find_all(nodes.Getattr)}
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        loops_over_content = any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))
        code = _ENVIRONMENT.compile(Metering(_ENVIRONMENT).visit(tree))
        template = jinja2.Template.from_code(_ENVIRONMENT, code, _ENVIRONMENT.make_globals(None))
    return CompiledTemplate(template, frozenset(names | constants), loops_over_content)


def _is_content(node: nodes.Node) -> bool:
    match node:
        case nodes.Name(name="content") | nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


@contextmanager
def _limited(clock: Callable[[], float]) -> Iterator[None]:
    """Give the block a fresh budget; whatever goes wrong in it leaves as a TemplateError."""
    token = Budget.current.set(Budget(clock))
    try:
        yield
    except TemplateError:
        raise
    except _Refusal as error:
        raise TemplateError(str(error)[:_MAX_MESSAGE]) from error
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template is invalid at line {error.lineno}: {error.message}"
        ) from error
    except RecursionError as error:
        raise TemplateError("the chat template nests or recurses too deeply") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
        raise TemplateError(f"the chat template failed: {reason}") from error
    finally:
        Budget.current.reset(token)


class _Refusal(Exception):
    """Raised by a template through `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _finalize(value: object) -> object:
    """Bound what a template prints before it is made into text."""
    return measured(value)


class _GenerationBlock(Extension):
    """`{% generation %}` ... `{% endgeneration %}` marks text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _CodeGenerator(CodeGenerator):
    """Evaluates nothing at compile time: folding of constants takes cubic time on chains of filters."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, in which every call, filter and growing operator spends from the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(
            optimized=False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_finalize,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock, TemplateHooks],
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.filters["tojson"] = _to_json
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name, function in self.filters.items():
            self.filters[name] = _bounded_filter(name, function)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REMOVED_METHODS and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right)
        return measured(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, TemplateHooks):
            return function(*args)
        spend(0)
        if isinstance(owner, str):
            args = _bounded_arguments(owner, function.__name__, args)
        return measured(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @functools.wraps(wrapped)
        def bounded(*args: Any, **kwargs: Any) -> str:
            require_size(SIZE_BEFORE["format"](value.__self__, *args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded


def _bounded_arguments(text: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a string method, after the size of its result was bounded."""
    if method == "join" and args:
        items = listed(args[0])
        require_size(SIZE_BEFORE["join"](items, text))
        return (items, *args[1:])
    if method in SIZE_BEFORE:
        require_size(SIZE_BEFORE[method](text, *args))
    return args


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        spend(0)
        given = list(args)
        if name in ("join", "sum"):
            given[first] = listed(given[first])
        if name in SIZE_BEFORE:
            require_size(SIZE_BEFORE[name](*given[first:], **kwargs))
        return measured(function(*given, **kwargs))

    return bounded


_ENVIRONMENT = _Sandbox()
