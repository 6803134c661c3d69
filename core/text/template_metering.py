"""Makes templates report their steps: a rewrite of the syntax tree before it is compiled.

Jinja lets a sandbox look into calls and operators only. Loop turns, concatenation, slices and literals are
turned into calls of hooks here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.visitor import NodeTransformer

from mvllm.core.text.template_limits import measured, require_size, size_of, spend


class TemplateHooks(Extension):
    """What metered templates call, through the environment: no variable of a template can hide it."""

    def turn(self, text_length: int) -> str:
        """One pass through a body that holds `text_length` characters of text."""
        spend(text_length)
        return ""

    def measured(self, value: object) -> object:
        return measured(value)

    def concatenated(self, *parts: object) -> str:
        require_size(sum(map(size_of, parts)))
        return measured("".join(map(str, parts)))

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        return measured(value[start:stop:step])


_Body = nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block


class Metering(NodeTransformer):
    """Makes a template report its loop turns and calls of macros, and the values made without a call."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: _Body) -> nodes.Node:  # noqa: N802
        texts = [data.data for data in node.find_all(nodes.TemplateData)]
        texts += [const.value for const in node.find_all(nodes.Const) if isinstance(const.value, str)]
        self.generic_visit(node)
        turn = self._hook("turn", [nodes.Const(sum(map(len, texts)))])
        node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno, environment=self._environment))
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_For  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._hook("concatenated", node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._hook("measured", [node])

    visit_Dict = visit_List  # noqa: N815

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._hook("measured", [node]) if node.ctx == "load" else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
        return self._hook("sliced", [node.node, *bounds])

    def _hook(self, name: str, arguments: Sequence[nodes.Node]) -> nodes.Call:
        method = nodes.ExtensionAttribute(TemplateHooks.identifier, name)
        call = nodes.Call(method, list(arguments), [], None, None)
        call.set_environment(self._environment)
        return call
