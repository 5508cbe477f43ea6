"""The sandbox in which chat templates run: Jinja's own, with the settings, filters and globals of transformers.

Lists and dictionaries may be changed, which transformers refuses but some published templates do; so a template that
does it gets copies (`changes_values`).
"""

import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, Protocol, cast

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace

_CHANGES = frozenset(
    ("append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update")
)
"""Methods that change a list or a dictionary."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote, for training; here only its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Computes nothing while it compiles: `{{ 9 ** 9 ** 9 }}` must be left to the process that can be killed."""

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        raise jinja2.nodes.Impossible


class VariableFinder(jinja2.meta.TrackingCodeGenerator):
    """Finds the variables that a template reads, like `find_undeclared_variables`, but computes nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.optimizer = None

    def _output_child_to_const(self, node: jinja2.nodes.Expr, frame: Any, finalize: Any) -> str:
        raise jinja2.nodes.Impossible


class _SafeNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could reach into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        attributes = dict(*args[1:], **kwargs)  # as in jinja2, so that `namespace(self=...)` works
        for name in attributes:
            _refuse_underscore(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


class _SafeDict:
    """`dict(...)` and `dict.fromkeys(...)`; nothing else of the class is available."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _ToJson(Protocol):
    def __call__(self, value: Any, **options: Any) -> str: ...


def tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text; what a filter such as `map` yields is written as an array."""
    return json.dumps(
        x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_as_list
    )


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _refuse_underscore(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r} on a namespace")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def changes_values(template: jinja2.nodes.Template) -> bool:
    """Whether a template may change a list or a dictionary."""
    return any(node.attr in _CHANGES for node in template.find_all(jinja2.nodes.Getattr))


def environment(kind: type[SandboxedEnvironment] = ImmutableSandboxedEnvironment) -> SandboxedEnvironment:
    """A new environment; in one of `SandboxedEnvironment`, templates may change lists and dictionaries."""
    made = kind(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        optimized=False,  # nothing of a template is computed before it is rendered
    )
    made.code_generator_class = _CodeGenerator
    made.filters["tojson"] = cast(_ToJson, tojson)
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["dict"] = _SafeDict()
    made.globals["namespace"] = _SafeNamespace
    return made
