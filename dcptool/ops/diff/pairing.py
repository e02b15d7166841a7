"""Which entry of one side is which of the other: by name, by names under one rule, and what was probably renamed.

Looks at names, kinds, dtypes and shapes only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from dcptool.checkpoint.selection import WRAPPERS, selects
from dcptool.errors import LayoutError
from dcptool.ops.diff.results import EXTRA_STATE, HYPER_PARAMETER, Alignment, DiffOptions, Known, Lone
from dcptool.words import endings

MAX_ALIKE = 4
"""Entries with the same ending that are looked at when a rule for names is searched."""
_PARAM_GROUPS = re.compile(r"(?:^|\.)param_groups(?:\.|$)")
_EXTRA_STATE = re.compile(r"(?:^|\.)_extra_state(?:/|\.|$)")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MAX_PARTS = 6
"""Parts of names that are compared to find what was renamed."""


class Pairing(NamedTuple):
    """Entries of both sides by what they have in common.

    Attributes:
        both: (A's entry, B's entry), in the order of A.
        only_in_a, only_in_b: the others.
        alignment: the rule that was found and used; None if there was none, or no need.
    """

    both: tuple[tuple[Known, Known], ...]
    only_in_a: tuple[Known, ...]
    only_in_b: tuple[Known, ...]
    alignment: Alignment | None


def pair(
    a: Sequence[Known], b: Sequence[Known], options: DiffOptions, names: Mapping[str, str] = MappingProxyType({})
) -> Pairing:
    """Pair entries by name, without the prefixes of the options, and the rest under a rule that makes most names equal.

    A rule is used if more than half of the smaller rest has a counterpart under it. Then the selection of the options
    is applied: a pair is selected by its stored name on either side.

    Args:
        a, b: what is known of the entries of each side.
        options: prefixes and selection.
        names: fqn in A → name to compare it under, for entries that were renamed on purpose.

    Raises:
        LayoutError: two entries of a side would have one name.
    """
    names_a = _named(a, options.strip_prefix_a, "A", names)
    names_b = _named(b, options.strip_prefix_b, "B", {})
    both = {known.fqn: (known, names_b[name]) for name, known in names_a.items() if name in names_b}
    rest_a = {name: known for name, known in names_a.items() if name not in names_b}
    rest_b = {name: known for name, known in names_b.items() if name not in names_a}
    rule = _find_rule(rest_a, rest_b, bool(both))
    n_aligned = 0
    if rule:
        rest_a, rest_b = rule.applied(rest_a, rule.prefix_a), rule.applied(rest_b, rule.prefix_b)
        aligned = {known.fqn: (known, rest_b[name]) for name, known in rest_a.items() if name in rest_b}
        n_aligned = sum(_is_selected(options, *found) for found in aligned.values())
        both |= aligned
    paired_b = {known.fqn for _, known in both.values()}
    return Pairing(
        tuple(both[known.fqn] for known in a if known.fqn in both and _is_selected(options, *both[known.fqn])),
        tuple(known for known in a if known.fqn not in both and _is_selected(options, known)),
        tuple(known for known in b if known.fqn not in paired_b and _is_selected(options, known)),
        Alignment(rule.prefix_a, rule.prefix_b, rule.wrappers, n_aligned) if rule and n_aligned else None,
    )


def lone(known: Known, excused: str = "") -> Lone:
    """Return an entry that is on one side only, with its topic."""
    topics = ((HYPER_PARAMETER, _PARAM_GROUPS), (EXTRA_STATE, _EXTRA_STATE))
    topic = next((topic for topic, pattern in topics if pattern.search(known.fqn)), "")
    return Lone(known.fqn, known.kind, known.dtype, known.shape, topic, excused)


def likely_renames(a: Iterable[Known], b: Iterable[Known]) -> list[tuple[Known, Known]]:
    """Return pairs of entries, each on one side only, that are probably one entry under two names.

    They have the same kind, dtype, shape and numbers in their names, and the same ending or, for tensors, all but the
    same ending; and nothing else on either side has.

    Returns:
        Pairs in the order of `a`.
    """
    found: dict[str, tuple[Known, Known]] = {}
    rest_a, rest_b = {known.fqn: known for known in a}, {known.fqn: known for known in b}
    order = list(rest_a)
    for key in [*(_ending(n_parts) for n_parts in range(_MAX_PARTS, 0, -1)), _beginning]:
        buckets_a, buckets_b = _buckets(rest_a.values(), key), _buckets(rest_b.values(), key)
        for same, (first, *more) in buckets_a.items():
            others = buckets_b.get(same, ())
            if not more and len(others) == 1:
                found[first.fqn] = first, others[0]
                del rest_a[first.fqn], rest_b[others[0].fqn]
    return [found[fqn] for fqn in order if fqn in found]


class _Rule(NamedTuple):
    """How names of both sides are changed: wrappers taken out, then a prefix taken off those of each side."""

    prefix_a: str
    prefix_b: str
    wrappers: tuple[str, ...]

    def applied(self, names: Mapping[str, Known], prefix: str) -> dict[str, Known]:
        """Return entries by their changed names; where two would have the same, they keep theirs."""
        changed = {name: _without(name, self.wrappers).removeprefix(prefix) or name for name in names}
        counts = Counter(changed.values())
        result: dict[str, Known] = {}
        for name, known in names.items():
            new = changed[name]
            result[new if counts[new] == 1 and (new == name or new not in names) else name] = known
        return result


def _find_rule(a: Mapping[str, Known], b: Mapping[str, Known], has_others: bool) -> _Rule | None:
    """Find the rule under which most entries without counterpart get one; `has_others`: other entries have theirs."""
    if not a or not b:
        return None
    wrappers = tuple(part for part in WRAPPERS if any(part in name.split(".") for name in (*a, *b)))
    clean = _Rule("", "", wrappers)
    cleaned = clean.applied(a, ""), clean.applied(b, "")
    candidates = [_Rule(*_prefixes(a, b), ()), clean, _Rule(*_prefixes(*cleaned), wrappers)]
    best, most = None, 0
    for rule in candidates:
        count = len(rule.applied(a, rule.prefix_a).keys() & rule.applied(b, rule.prefix_b).keys())
        if count > most:
            best, most = rule, count
    smaller = min(len(a), len(b))
    return best if 2 * most > smaller and (most > 1 or not has_others) else None


def _prefixes(a: Mapping[str, Known], b: Mapping[str, Known]) -> tuple[str, str]:
    """Return what most names of A, and those of B with the same ending, begin with: ("model.", "")."""
    by_tail: dict[str, list[str]] = {}
    for name in a:
        for tail in endings(name):
            alike = by_tail.setdefault(tail, [])
            if len(alike) < MAX_ALIKE:
                alike.append(name)
    counts: Counter[tuple[str, str]] = Counter()
    for name in b:
        for tail in endings(name):
            alike = [other for other in by_tail.get(tail, ()) if a[other].kind == b[name].kind]
            if alike:
                counts.update((other.removesuffix(tail), name.removesuffix(tail)) for other in alike)
                break
    return counts.most_common(1)[0][0] if counts else ("", "")


def _without(name: str, parts: tuple[str, ...]) -> str:
    return ".".join(part for part in name.split(".") if part not in parts) if parts else name


def _named(side: Sequence[Known], prefix: str, letter: str, given: Mapping[str, str]) -> dict[str, Known]:
    """Return the entries of a side by the names they are compared under: a given one, or theirs without the prefix."""
    names: dict[str, Known] = {}
    for known in side:
        name = given.get(known.fqn) or known.fqn.removeprefix(prefix)
        if name in names:
            without = f" without the prefix {prefix!r}" if prefix else ""
            raise LayoutError(f"{names[name].fqn!r} and {known.fqn!r} of {letter}{without} would both be {name!r}")
        names[name] = known
    return names


def _is_selected(options: DiffOptions, *entries: Known) -> bool:
    names = [known.fqn for known in entries]
    return any(selects(name, options.keys, ()) for name in names) and all(
        selects(name, (), options.exclude) for name in names
    )


def _buckets(entries: Iterable[Known], key: Callable[[Known], Hashable]) -> dict[Hashable, list[Known]]:
    buckets: dict[Hashable, list[Known]] = {}
    for known in entries:
        same = key(known)
        if same is not None:
            buckets.setdefault(same, []).append(known)
    return buckets


def _looks(known: Known) -> Hashable:
    return known.kind, known.dtype, known.shape, tuple(_NUMBER.findall(known.fqn))


def _ending(n_parts: int) -> Callable[[Known], Hashable]:
    def key(known: Known) -> Hashable:
        parts = known.fqn.split(".")
        if len(parts) < n_parts or (known.kind != "tensor" and n_parts < 2):
            return None
        return _looks(known), tuple(parts[-n_parts:])

    return key


def _beginning(known: Known) -> Hashable:
    beginning = known.fqn.rpartition(".")[0]
    return (_looks(known), beginning) if beginning and known.kind == "tensor" else None
