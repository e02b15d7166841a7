"""What a comparison takes and gives: options and frozen results. Knows nothing of how they come about."""

from __future__ import annotations

from typing import NamedTuple

from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.findings import Finding

HYPER_PARAMETER = "hyper-parameter"
EXTRA_STATE = "extra-state"
Number = int | float | complex


class DiffOptions(NamedTuple):
    """How two checkpoints are compared.

    Attributes:
        keys, exclude: names or shell globs of what is compared and what is not; an entry counts as named if it is
            under its stored name on either side.
        strip_prefix_a, strip_prefix_b: taken off names of that side that begin with it.
        rtol, atol: elements are equal if |a - b| ≤ atol + rtol·|b| and b is finite; with both 0 their bits must
            be equal.
        nan_equal: any NaN equals any other; without it only one of the same bits.
        layout: how tensors are cut into chunks is compared too.
        threads: boxes read at the same time, None for the number of processors, at most 8.
    """

    keys: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix_a: str = ""
    strip_prefix_b: str = ""
    rtol: float = 0.0
    atol: float = 0.0
    nan_equal: bool = False
    layout: bool = False
    threads: int | None = None

    @property
    def is_tolerant(self) -> bool:
        """Whether elements may differ a little."""
        return self.rtol > 0 or self.atol > 0


class Known(NamedTuple):
    """What is known of an entry without reading it.

    Attributes:
        fqn: its name on its side.
        kind: "tensor" or "object".
        dtype: torch's name without prefix, "" for an object.
        shape: in elements, () for an object.
        path: nested position; None where it is not recorded.
    """

    fqn: str
    kind: str
    dtype: str = ""
    shape: Ints = ()
    path: tuple[str | int, ...] | None = None

    @property
    def words(self) -> str:
        """Kind, dtype and shape in words."""
        return f"{self.kind} {self.dtype} {list(self.shape)}" if self.kind == "tensor" else self.kind


class Side(NamedTuple):
    """One of the two: where it is, what it is, how many entries it has, and the bytes of its tensors' values."""

    path: str
    format: str
    flavour: str
    n_tensors: int
    n_objects: int
    nbytes: int


class Lone(NamedTuple):
    """An entry that is on one side only.

    Attributes:
        fqn, kind, dtype, shape: as in `Known`.
        topic: HYPER_PARAMETER for an entry of an optimizer's param_groups, EXTRA_STATE, or "".
        excused: why it does not count as a difference: the other side's format cannot hold it; "" if it counts.
    """

    fqn: str
    kind: str
    dtype: str
    shape: Ints
    topic: str
    excused: str = ""


class Rename(NamedTuple):
    """Two entries, each on one side only, that are probably one under two names.

    `equal` tells whether their values are equal, None if they were not compared.
    """

    fqn_a: str
    fqn_b: str
    equal: bool | None


class Alignment(NamedTuple):
    """A rule under which the names of both sides are mostly the same, found by looking at them.

    Attributes:
        prefix_a, prefix_b: what was taken off the names of each side.
        wrappers: parts of wrappers that were taken out of names on either side.
        n_aligned: entries that have a counterpart only because of it.
    """

    prefix_a: str
    prefix_b: str
    wrappers: tuple[str, ...]
    n_aligned: int


class Statistics(NamedTuple):
    """Of one side of a tensor: NaN and infinite elements, mean and Euclidean norm of the finite ones.

    `mean` is None for complex tensors, and where there is no finite element.
    """

    n_nan: int
    n_inf: int
    mean: float | None
    norm: float


class Values(NamedTuple):
    """How the values of two tensors of one shape differ.

    Attributes:
        compared_as: the dtype both were compared in, torch's name.
        n_elements, n_different: elements of the tensor, and those that differ.
        max_abs: largest |a - b| of elements that are finite on both sides; None if there are none or they are no
            numbers. Exact for integers.
        max_rel: largest |a - b| / max(|a|, |b|) of these.
        first: index of the first element that differs, in row-major order; None if none does.
        first_a, first_b: its values; None where they are no numbers.
        same_multiset: the same values, bit for bit, stand in another order.
        rounded: where the dtypes differ, the narrower one if rounding the other side to it gives equal values, else "".
        a, b: statistics of each side; None where elements are no numbers, or none differ.
    """

    compared_as: str
    n_elements: int
    n_different: int
    max_abs: float | None = None
    max_rel: float | None = None
    first: Ints | None = None
    first_a: Number | None = None
    first_b: Number | None = None
    same_multiset: bool = False
    rounded: str = ""
    a: Statistics | None = None
    b: Statistics | None = None


class Difference(NamedTuple):
    """One way in which one entry differs.

    Attributes:
        kind: "kind" (tensor or object), "shape", "dtype", "values", "object" or "layout".
        fqn_a, fqn_b: its name on each side.
        a, b: what differs, in few words.
        where: of an object, the place of the first difference inside it, as `['betas'][1]`.
        values: for "values", and for "dtype" where values were compared.
    """

    kind: str
    fqn_a: str
    fqn_b: str
    a: str
    b: str
    where: str = ""
    values: Values | None = None


class DiffReport(NamedTuple):
    """The outcome of a comparison.

    Attributes:
        a, b: the two sides; of a live state dict the path is "(live)".
        n_tensors, n_objects: entries on both sides that were compared.
        nbytes: bytes of A's values in them.
        only_in_a, only_in_b: entries without counterpart.
        renames: pairs of these that are probably one entry each.
        differences: of entries on both sides, in the order of A.
        alignment: how names were made the same; None if they are, or as the options say.
        n_within: tensors that are equal within the tolerance asked for, but not bit for bit.
        unreadable: what could not be read, as findings of kind "unreadable".
        notes: worth knowing; no differences.
        values_compared: False for a live state dict: names, kinds, shapes and dtypes alone.
    """

    a: Side
    b: Side
    n_tensors: int
    n_objects: int
    nbytes: int
    only_in_a: tuple[Lone, ...]
    only_in_b: tuple[Lone, ...]
    renames: tuple[Rename, ...]
    differences: tuple[Difference, ...]
    alignment: Alignment | None
    n_within: int
    unreadable: tuple[Finding, ...]
    notes: tuple[Finding, ...]
    values_compared: bool

    @property
    def equal(self) -> bool:
        """Whether both hold the same under the same names, as far as their formats can, and all of it was readable."""
        lone = [entry for entry in (*self.only_in_a, *self.only_in_b) if not entry.excused]
        return not (lone or self.differences or self.alignment or self.unreadable)
