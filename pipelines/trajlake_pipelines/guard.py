"""The shapes of pipeline that every runner computes, and a refusal by name of all others.

Beam's DaskRunner says nothing where it does not know a transform: it hands its input on. What it gets wrong (tried with
apache-beam 2.77): every leaf but Create, ParDo, GroupByKey and Flatten (a Combine gives its input, a WindowInto no
windows), side inputs and tags that meet, what `finish_bundle` yields, state and timers, and all
branches but the last.
"""

from __future__ import annotations

import apache_beam as beam
from apache_beam.pipeline import AppliedPTransform, PipelineVisitor
from apache_beam.runners.common import DoFnSignature

from trajlake.errors import UsageError

_WHOLE = (beam.Create, beam.GroupByKey, beam.Flatten)
"""Replaced by every runner as they are, so that what is inside does not matter."""


def check_shape(pipeline: beam.Pipeline) -> None:
    """Raise UsageError that names the first transform, and what it is, that some runner would silently get wrong."""
    visitor = _Visitor()
    pipeline.visit(visitor)
    ends = [label for label, outputs in visitor.outputs.items() if not any(each in visitor.read for each in outputs)]
    if visitor.problem is None and len(ends) > 1:
        visitor.problem = f"{' and '.join(sorted(ends))} are several ends of one pipeline; only the last is computed"
    if visitor.problem is not None:
        raise UsageError(f"this pipeline would not give the same on every runner: {visitor.problem}")


class _Visitor(PipelineVisitor):
    def __init__(self) -> None:
        self.problem: str | None = None
        self.outputs: dict[str, list[object]] = {}
        self.read: set[object] = set()
        self._inside: AppliedPTransform | None = None

    def enter_composite_transform(self, transform_node: AppliedPTransform) -> None:
        if self._inside is None and type(transform_node.transform) in _WHOLE:
            self._inside = transform_node
            self._note(transform_node)

    def leave_composite_transform(self, transform_node: AppliedPTransform) -> None:
        if self._inside is transform_node:
            self._inside = None

    def visit_transform(self, transform_node: AppliedPTransform) -> None:
        if self._inside is not None or self.problem is not None:
            return
        self._note(transform_node)
        reason = _wrong_with(transform_node)
        if reason is not None:
            kind = type(transform_node.transform).__name__
            self.problem = f"{transform_node.full_label!r} ({kind}) {reason}"

    def _note(self, node: AppliedPTransform) -> None:
        self.outputs[node.full_label] = list(node.outputs.values())
        self.read.update(node.inputs)


def _wrong_with(node: AppliedPTransform) -> str | None:
    transform = node.transform
    if type(transform) in _WHOLE:
        return None
    if type(transform) is not beam.ParDo:
        return "is none of Create, ParDo, GroupByKey and Flatten"
    if node.side_inputs:
        return "has side inputs"
    if set(node.outputs) - {None}:
        return "has tagged outputs"
    signature = DoFnSignature(transform.fn)
    if signature.is_stateful_dofn():
        return "has state or timers"
    if signature.is_splittable_dofn():
        return "is splittable"
    if type(transform.fn).finish_bundle is not beam.DoFn.finish_bundle and not _is_callable_wrapper(transform.fn):
        return "yields from finish_bundle"
    return None


def _is_callable_wrapper(function: beam.DoFn) -> bool:
    """Beam's own wrapper of plain functions (Map, FlatMap, Filter)."""
    return type(function).__module__ == "apache_beam.transforms.core"
