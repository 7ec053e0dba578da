"""A batch: drawn episodes, or windows of them, as trajectories, as Arrow tables, and as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from trajlake.errors import UsageError
from trajlake.ingest.arrays import element_type
from trajlake.read.items import Pieces
from trajlake.read.source import Source
from trajlake.read.trajectory import Trajectory, restored
from trajlake_schemas import STEPS

if TYPE_CHECKING:
    from trajlake.read.sampler import Sample

Array = np.ndarray[Any, Any]


class Batch:
    """What one call of `Sampler.batch` drew: a sequence of trajectories, in the order of `samples`.

    Arrow tables are slices of what was read, and numpy arrays of numbers are views of them: nothing is copied until
    rows are put side by side. Samples and trajectories are made when they are first asked for. Not a
    `collections.abc.Sequence`, of which PyTorch's loader makes a list. A pickled batch has what was read, and needs its
    snapshot no more.
    """

    def __init__(self, source: Source, samples: Callable[[], list[Sample]], rows: pl.DataFrame, pieces: Pieces) -> None:
        self._make_samples = samples
        self._source = source
        self._rows = rows
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._rows)

    @cached_property
    def samples(self) -> list[Sample]:
        """What was drawn, in this order."""
        return self._make_samples()

    @property
    def draws(self) -> int:
        """How many draws it is of; a drawn group is one."""
        return len(np.unique(self._pieces.draw))

    # -- as Arrow --------------------------------------------------------------------------------------------

    @cached_property
    def tables(self) -> list[pa.Table]:
        """For each sample the rows of its steps."""
        whole = self._source.steps_of(self._rows, keep=True)
        bounds = zip(self._pieces.start.tolist(), self._pieces.stop.tolist(), strict=True)
        return [
            table if stop - start == len(table) else table.slice(start, stop - start)
            for table, (start, stop) in zip(whole, bounds, strict=True)
        ]

    @property
    def steps(self) -> pa.Table:
        """All of them one after another (chunks of one table, nothing is copied)."""
        return pa.concat_tables(self.tables) if self.tables else STEPS.arrow.empty_table()

    # -- as numpy --------------------------------------------------------------------------------------------

    def views(self, column: str) -> list[Array]:
        """For each sample a column of its steps as a read-only view, shape (steps,); a copy only where an episode is so
        long that it was read in pieces. Raises UsageError for a column that is not numeric or that has nulls."""
        found = []
        for table in self.tables:
            try:
                chunks = [chunk for chunk in table[column].chunks if len(chunk)]
                whole = (
                    chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks or [pa.array([], table[column].type)])
                )
                found.append(whole.to_numpy(zero_copy_only=True))
            except pa.ArrowInvalid as error:
                raise UsageError(f"column {column!r} cannot be viewed without a copy: {error}") from error
            except KeyError:
                raise UsageError(f"steps have no column {column!r}") from None
        return found

    def array(self, name: str) -> Array:
        """A column of numbers, or the tensors of that name (`observation`, `action`), shape (samples, length, …).

        Behind the end of a sample that is shorter than the longest (or than a padded window) are zeros: `valid` says
        where. A null is NaN, of Booleans False. Raises UsageError where steps have none of that name, or shapes that
        differ.
        """
        values = _numbers(self.steps, name)
        found = np.zeros((len(self), self._length, *values.shape[1:]), values.dtype)
        found[self.valid] = values
        return found

    @cached_property
    def lengths(self) -> Array:
        """Steps of each sample, shape (samples,)."""
        return self._pieces.stop - self._pieces.start

    @cached_property
    def _length(self) -> int:
        return int(self._pieces.length.max()) if len(self) else 0

    @property
    def valid(self) -> Array:
        """True where a step is, False in the padding; shape (samples, length)."""
        return np.arange(self._length) < self.lengths[:, None]

    @property
    def is_first(self) -> Array:
        """RLDS: the step is the first of its episode; shape (samples, length)."""
        return self._at(self._pieces.start == 0, np.zeros(len(self), np.int64))

    @property
    def is_last(self) -> Array:
        """RLDS: the step is the last of its episode; shape (samples, length)."""
        whole = self._rows["n_steps"].cast(pl.Int64).to_numpy()
        return self._at(self._pieces.stop == whole, self.lengths - 1)

    @property
    def is_terminal(self) -> Array:
        """RLDS: the environment ended there (`terminated`; false where the source did not say); shape as `valid`."""
        flags = np.zeros((len(self), self._length), bool)
        for row, table in zip(flags, self.tables, strict=True):
            row[: len(table)] = pc.fill_null(table["terminated"], False).to_numpy()
        return flags

    def _at(self, which: Array, where: Array) -> Array:
        flags = np.zeros((len(self), self._length), bool)
        chosen = np.flatnonzero(which & (self.lengths > 0))
        flags[chosen, where[chosen]] = True
        return flags

    # -- as trajectories -------------------------------------------------------------------------------------

    @cached_property
    def trajectories(self) -> list[Trajectory]:
        """The samples as trajectories; a window has the steps of the window."""
        rows = self._whole_rows.iter_rows(named=True)
        return [
            Trajectory(restored(row), [restored(step) for step in table.to_pylist()])
            for row, table in zip(rows, self.tables, strict=True)
        ]

    @cached_property
    def _whole_rows(self) -> pl.DataFrame:
        return self._source.rows_of([sample.episode_id for sample in self.samples])

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Trajectory]: ...

    def __getitem__(self, index: int | slice) -> Trajectory | Sequence[Trajectory]:
        return self.trajectories[index]

    # -- in other processes ----------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, STEPS.arrow) as stream:  # a pickled slice would have all that it is a slice of
            stream.write_table(self.steps.combine_chunks())
        kept = {name: getattr(self, name) for name in ("samples", "_rows", "_pieces", "_whole_rows")}
        return {**kept, "steps": sink.getvalue().to_pybytes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        steps = pa.ipc.open_stream(state.pop("steps")).read_all()
        self.__dict__.update(state)
        first = np.cumsum(self.lengths) - self.lengths
        bounds = zip(first.tolist(), self.lengths.tolist(), strict=True)
        self.tables = [steps.slice(start, length) for start, length in bounds]


def _numbers(table: pa.Table, name: str) -> Array:
    if name in table.schema.names:
        kind = table.schema.field(name).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
            raise UsageError(f"column {name!r} is a {kind}, not a number")
        if pa.types.is_boolean(kind):
            return np.asarray(pc.fill_null(table[name], False).to_numpy(), bool)
        return np.asarray(table[name].to_numpy())
    return tensors(table, name)


def tensors(table: pa.Table, name: str) -> Array:
    """The tensors `name` of these steps as one array, shape (steps, …). Raises UsageError where a step has none, and
    where dtype or shape differ."""
    if not len(table):
        return np.zeros(0)
    entries = pc.list_flatten(table["tensors"].combine_chunks())
    mine = entries.filter(pc.equal(pc.struct_field(entries, "name"), name))
    if len(mine) != len(table):
        raise UsageError(f"{len(table) - len(mine)} of {len(table)} steps have no column and no tensor {name!r}")
    kinds, shapes = pc.struct_field(mine, "dtype").unique(), pc.struct_field(mine, "shape")
    shape = shapes[0].as_py()
    if len(kinds) > 1 or not _all_equal(shapes, shape):
        raise UsageError(f"the tensors {name!r} differ in dtype or shape: read them step by step")
    data = b"".join(pc.struct_field(mine, "data").to_pylist())
    return np.frombuffer(data, element_type(kinds[0].as_py())).reshape(len(table), *shape)


def _all_equal(shapes: pa.ListArray, shape: list[int]) -> bool:
    if pc.any(pc.not_equal(pc.list_value_length(shapes), len(shape))).as_py():
        return False
    return bool((pc.list_flatten(shapes).to_numpy().reshape(len(shapes), len(shape)) == shape).all())
