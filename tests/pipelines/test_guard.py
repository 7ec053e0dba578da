"""The guard lets through what every runner computes, and names what some runner would silently get wrong."""

import apache_beam as beam
import pytest
from apache_beam.transforms import window

from trajlake.errors import UsageError
from trajlake_pipelines.guard import check_shape

pytestmark = pytest.mark.unit


class Finishes(beam.DoFn):
    def process(self, element):
        yield element

    def finish_bundle(self):
        yield window.GlobalWindows.windowed_value(1)


class Remembers(beam.DoFn):
    COUNT = beam.transforms.userstate.CombiningValueStateSpec("count", sum)

    def process(self, element, count=beam.DoFn.StateParam(COUNT)):  # noqa: B008
        count.add(1)
        yield element


class Splits(beam.DoFn):
    class Ranges(beam.transforms.core.RestrictionProvider):
        def initial_restriction(self, element):
            return beam.io.restriction_trackers.OffsetRange(0, element)

        def create_tracker(self, restriction):
            return beam.io.restriction_trackers.OffsetRestrictionTracker(restriction)

        def restriction_size(self, element, restriction):
            return restriction.size()

    def process(self, element, tracker=beam.DoFn.RestrictionParam(Ranges())):  # noqa: B008
        yield element


class Waits(beam.DoFn):
    TIMER = beam.transforms.userstate.TimerSpec("later", beam.TimeDomain.WATERMARK)

    def process(self, element, timer=beam.DoFn.TimerParam(TIMER)):  # noqa: B008
        timer.set(1)
        yield element

    @beam.transforms.userstate.on_timer(TIMER)
    def later(self):
        yield 1


def tags(element):
    yield beam.pvalue.TaggedOutput("odd", element)


def numbers(pipeline):
    return pipeline | "numbers" >> beam.Create([1, 2], reshuffle=False)


WRONG = {
    "Combine": lambda p: numbers(p) | "sum" >> beam.CombineGlobally(sum),
    "WindowInto": lambda p: numbers(p) | "cut" >> beam.WindowInto(window.FixedWindows(5)),
    "side inputs": lambda p: (
        numbers(p)
        | "with" >> beam.Map(lambda x, y: x + y, beam.pvalue.AsSingleton(p | beam.Create([3], reshuffle=False)))
    ),
    "tagged outputs": lambda p: numbers(p) | "split" >> beam.FlatMap(tags).with_outputs("odd", main="even"),
    "finish_bundle": lambda p: numbers(p) | "end" >> beam.ParDo(Finishes()),
    "state": lambda p: numbers(p) | "key" >> beam.Map(lambda x: (x, x)) | "count" >> beam.ParDo(Remembers()),
    "timers": lambda p: numbers(p) | "key" >> beam.Map(lambda x: (x, x)) | "wait" >> beam.ParDo(Waits()),
    "splittable": lambda p: numbers(p) | "split" >> beam.ParDo(Splits()),
    # Beam's sinks of files delete what matches their target.
    "a sink of files": lambda p: numbers(p) | "put" >> beam.io.WriteToText("/nowhere/out"),
    "a read": lambda p: p | "take" >> beam.io.ReadFromText("/nowhere/in", validate=False),
    "tags that meet side inputs": lambda p: (
        lambda split: split.even | "both" >> beam.Map(lambda x, y: x, beam.pvalue.AsList(split.odd))
    )(numbers(p) | "split" >> beam.FlatMap(tags).with_outputs("odd", main="even")),
    "a branch that is not the last": lambda p: (
        lambda made: [made | "left" >> beam.Map(str), made | "right" >> beam.GroupByKey()]
    )(numbers(p) | "key" >> beam.Map(lambda x: (x, x))),
    "several ends": lambda p: (lambda made: [made | name >> beam.Map(str) for name in ("one", "two")])(numbers(p)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_shape_that_a_runner_gets_wrong_is_refused_by_name(what):
    pipeline = beam.Pipeline("FnApiRunner")
    WRONG[what](pipeline)
    names = {
        "Combine": "sum",
        "WindowInto": "cut",
        "side inputs": "side inputs",
        "timers": "'wait'.*timers",
        "a sink of files": "put/",
        "a read": "take/",
        "tags that meet side inputs": "'split.*tagged outputs",
        "a branch that is not the last": "left and right are several ends",
    }
    with pytest.raises(UsageError, match=names.get(what, what)):
        check_shape(pipeline)


def test_create_pardo_groupbykey_and_flatten_pass():
    pipeline = beam.Pipeline("FnApiRunner")
    one = pipeline | "one" >> beam.Create([1], reshuffle=False)
    two = pipeline | "two" >> beam.Create([2], reshuffle=False)
    _ = (one, two) | beam.Flatten() | beam.Map(lambda x: (x, x)) | beam.GroupByKey() | beam.Filter(bool)
    check_shape(pipeline)
