"""What a comparison found, as text and as JSON. The text stays short however much differs: alike rows become one."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from dcptool.ops.diff.results import (
    EXTRA_STATE,
    HYPER_PARAMETER,
    Alignment,
    Difference,
    DiffReport,
    Lone,
    Rename,
    Side,
    Statistics,
    Values,
)
from dcptool.render.findings import finding_json, finding_lines
from dcptool.render.folding import fold
from dcptool.render.text import table
from dcptool.words import cut_lines, listed, nbytes, plural, shown

SCHEMA = 1
MAX_ROWS = 40
"""Rows of one table; with more of them, those that differ only in the numbers in their names are one."""
MAX_NAMED = 8
_NUMBER = re.compile(r"\d+")
_OF_TENSORS = ("values", "dtype", "shape")


def diff_text(report: DiffReport, width: int) -> str:
    """Return the report: the verdict in its first line, then what differs, then what is worth knowing."""
    blocks = [verdict(report)]
    if not report.equal:
        blocks.append("\n".join(_side_line(letter, side) for letter, side in (("A", report.a), ("B", report.b))))
    if report.alignment:
        blocks.append(_alignment_text(report.alignment))
    blocks += _lone_blocks(report)
    if report.renames:
        blocks.append(_renames_text(report.renames))
    others = [difference for difference in report.differences if difference.kind != "values"]
    values = [difference for difference in report.differences if difference.kind == "values"]
    blocks += [_others_table(others, width)] if others else []
    blocks += [_values_table(values, width)] if values else []
    blocks += ["\n".join(finding_lines(found, "")) for found in (report.unreadable, report.notes) if found]
    return "\n\n".join(blocks)


def verdict(report: DiffReport) -> str:
    """Return the outcome in one line."""
    same = ", ".join(_counts(report))
    excused = [entry for entry in (*report.only_in_a, *report.only_in_b) if entry.excused]
    left_out = f"; only on one side: {_excused_words(excused)}" if excused else ""
    if report.equal and not report.values_compared:
        return f"equal in names, kinds, shapes and dtypes: {same}; values were not compared{left_out}"
    if report.equal:
        return f"equal: {same}{left_out}"
    found = _found(report)
    if not found:
        return f"not readable: {plural(_n_unreadable(report), 'entry')}; nothing else differs"
    if report.unreadable:
        found.append(f"{_n_unreadable(report):,} not readable")
    rest = "; all values equal" if report.values_compared and report.alignment and len(found) == 1 else ""
    return f"different: {', '.join(found)}{rest}"


def _excused_words(entries: Sequence[Lone]) -> str:
    """Say how many entries are excused, and why: all of a side for one reason."""
    return f"{plural(len(entries), 'object')} ({entries[0].excused})"


def _n_unreadable(report: DiffReport) -> int:
    """Return how many entries cannot be read; what is wrong with the metadata as a whole counts as one each."""
    return len({finding.fqn or finding.message for finding in report.unreadable})


def _counts(report: DiffReport) -> list[str]:
    within = f" ({report.n_within:,} within the tolerance, not bit for bit)" if report.n_within else ""
    counts = [plural(report.n_tensors, "tensor") + within]
    if report.n_objects or not report.n_tensors:
        counts.append(plural(report.n_objects, "object"))
    return [*counts, nbytes(report.nbytes)] if report.values_compared else counts


def _found(report: DiffReport) -> list[str]:
    """Return what differs, counted."""
    found = [f"names of {plural(report.alignment.n_aligned, 'entry')}"] if report.alignment else []
    for noun, kinds in (("tensor", _OF_TENSORS), *((kind, (kind,)) for kind in ("object", "kind", "layout"))):
        names = {difference.fqn_a for difference in report.differences if difference.kind in kinds}
        found += [plural(len(names), noun)] if names else []
    for letter, entries in (("A", report.only_in_a), ("B", report.only_in_b)):
        count = sum(not entry.excused for entry in entries)
        found += [f"{plural(count, 'key')} only in {letter}"] if count else []
    return found


def _side_line(letter: str, side: Side) -> str:
    counts = f"{plural(side.n_tensors, 'tensor')}, {plural(side.n_objects, 'object')}"
    return f"{letter}  {shown(side.path)}  ({shown(side.flavour)}, {counts})"


def _alignment_text(alignment: Alignment) -> str:
    """Return the rule under which names were compared, and the options that say it is meant."""
    rules, options = [], []
    if alignment.wrappers:
        rules.append(f"without parts of wrappers ({', '.join(alignment.wrappers)})")
    for letter, prefix in (("A", alignment.prefix_a), ("B", alignment.prefix_b)):
        if prefix:
            rules.append(f"without the prefix {shown(prefix)!r} of {letter}")
            options.append(f"--strip-prefix-{letter.lower()} {shown(prefix)}")
    hint = f"\n  If that is meant: {' '.join(options)}" if options and not alignment.wrappers else ""
    return f"names of {plural(alignment.n_aligned, 'entry')} were compared {' and '.join(rules)}{hint}"


def _lone_blocks(report: DiffReport) -> list[str]:
    blocks = []
    for letter, entries in (("A", report.only_in_a), ("B", report.only_in_b)):
        counted = [entry for entry in entries if not entry.excused]
        lines = _topic_lines(letter, counted)
        plain = [entry for entry in counted if not entry.topic]
        if plain:
            lines += [f"only in {letter}: {plural(len(plain), 'key')}", *_lone_lines(plain)]
        excused = [entry for entry in entries if entry.excused]
        if excused and not report.equal:
            lines.append(f"only in {letter} without being a difference: {_excused_words(excused)}")
        blocks += ["\n".join(lines)] if lines else []
    return blocks


def _topic_lines(letter: str, entries: Sequence[Lone]) -> list[str]:
    lines = []
    hyper = [_last_part(entry.fqn) for entry in entries if entry.topic == HYPER_PARAMETER]
    if hyper:
        names = dict.fromkeys(hyper)
        counted = [shown(name) + (f" ×{hyper.count(name)}" if hyper.count(name) > 1 else "") for name in names]
        lines.append(f"optimizer hyper-parameters only in {letter}: {listed(counted, MAX_NAMED)}")
    extra = sum(entry.topic == EXTRA_STATE for entry in entries)
    if extra:
        lines.append(
            f"_extra_state only in {letter}: {plural(extra, 'entry')} (--exclude '*_extra_state*' leaves them out)"
        )
    return lines


def _last_part(fqn: str) -> str:
    """Return the name of a hyper-parameter: the last part of an fqn that is no number."""
    parts = [part for part in fqn.split(".") if not part.isdigit()]
    return parts[-1] if parts else fqn


def _lone_lines(entries: Sequence[Lone]) -> list[str]:
    def words(entry: Lone) -> str:
        return f"{entry.dtype} {list(entry.shape)}" if entry.kind == "tensor" else entry.kind

    rows = _folded(entries, lambda entry: entry.fqn, words)
    room = max((len(name) for name, _ in rows), default=0)
    lines = [f"  {name:<{room}}  {words(group[0])}{_times(group)}" for name, group in rows]
    return _cut(lines, len(rows), "  ")


def _times(group: Sequence[object]) -> str:
    return f"  ×{len(group):,}" if len(group) > 1 else ""


def _renames_text(renames: Sequence[Rename]) -> str:
    says = {True: "  (equal values)", False: "  (other values)", None: ""}
    rows = _folded(renames, lambda pair: pair.fqn_a, lambda pair: (_NUMBER.sub("0", pair.fqn_b), pair.equal))
    lines = []
    for name, group in rows:
        other = _folded(group, lambda pair: pair.fqn_b, lambda pair: None, most=1)[0][0]
        lines.append(f"  {name} → {other}{_times(group)}{says[group[0].equal]}")
    return "\n".join([f"probably renamed: {plural(len(renames), 'entry')}", *_cut(lines, len(rows), "  ")])


def _folded(
    entries: Sequence[Any], name: Callable[[Any], str], alike: Callable[[Any], Hashable], most: int = MAX_ROWS
) -> list[tuple[str, list[Any]]]:
    """Return (name, entries) of each row; more than `most` are folded where `alike` is equal."""
    if len(entries) <= most:
        return [(shown(name(entry)), [entry]) for entry in entries]
    folds = fold([name(entry) for entry in entries], [alike(entry) for entry in entries])
    return [(shown(found.name), [entries[index] for index in found.indexes]) for found in folds]


def _cut(lines: list[str], count: int, indent: str = "") -> list[str]:
    return cut_lines(lines, MAX_ROWS, count, indent=indent) if count > MAX_ROWS else lines


def _others_table(differences: Sequence[Difference], width: int) -> str:
    def cells(difference: Difference) -> tuple[str, ...]:
        where = f"at {difference.where}" if difference.where else ""
        note = _cast_words(difference) if difference.kind == "dtype" else where
        return difference.kind, shown(difference.a), shown(difference.b), shown(note) if note else ""

    rows = _folded(differences, lambda difference: difference.fqn_a, cells)
    kept_rows = [[name + _times(group), *cells(group[0])] for name, group in rows[:MAX_ROWS]]
    has_notes = any(row[4] for row in kept_rows)
    headers = ["entry", "differs in", "A", "B", "note"]
    text = table(
        headers if has_notes else headers[:4], kept_rows if has_notes else [r[:4] for r in kept_rows], width=width
    )
    return "\n".join([text, *cut_lines([], MAX_ROWS, len(rows))])


def _cast_words(difference: Difference) -> str:
    """Say how values of two dtypes compare."""
    values = difference.values
    if values is None:
        return ""
    if not values.n_different:
        return f"equal as {values.compared_as}"
    if values.rounded:
        wide = "B" if values.rounded == difference.a else "A"
        return f"equal once {wide} is rounded to {values.rounded}"
    most = "" if values.max_abs is None else f", max abs {_short(values.max_abs)}"
    return f"{values.n_different:,} of {values.n_elements:,} differ as {values.compared_as}{most}"


def _values_table(differences: Sequence[Difference], width: int) -> str:
    rows = _folded(
        differences, lambda difference: difference.fqn_a, lambda difference: (difference.a, _note(difference))
    )
    kept_rows = [[name + _times(group), *_value_cells(group)] for name, group in rows[:MAX_ROWS]]
    headers = ["tensor", "differing", "max abs", "max rel", "first at", "norm", "mean", "note"]
    kept = [index for index in range(len(headers)) if index < 2 or any(row[index] for row in kept_rows)]
    right = [position for position, index in enumerate(kept) if 1 <= index <= 3]
    text = table([headers[i] for i in kept], [[row[i] for i in kept] for row in kept_rows], right, width)
    return "\n".join([text, *cut_lines([], MAX_ROWS, len(rows))])


def _value_cells(group: Sequence[Difference]) -> list[str]:
    found = [difference.values for difference in group if difference.values]
    counts = f"{sum(v.n_different for v in found):,} of {sum(v.n_elements for v in found):,}"
    pairs = zip(*((values.max_abs, values.max_rel) for values in found), strict=True)
    most = [max((error for error in errors if error is not None), default=None) for errors in pairs]
    cells = [counts, *("" if error is None else _short(error) for error in most)]
    if len(found) > 1:
        return [*cells, "", "", "", _note(group[0])]
    values = found[0]
    first = str(list(values.first)) if values.first else ""
    return [*cells, first, _both(values, "norm"), _both(values, "mean"), _note(group[0])]


def _both(values: Values, field: str) -> str:
    """Return a statistic of both sides; once, if they look the same."""
    if values.a is None or values.b is None:
        return ""
    sides = [getattr(side, field) for side in (values.a, values.b)]
    one, other = ("–" if value is None else _short(value) for value in sides)
    return one if one == other else f"{one} → {other}"


def _note(difference: Difference) -> str:
    values = difference.values
    if values is None:
        return ""
    notes = ["same values in another order"] if values.same_multiset else []
    if values.a and values.b:
        for name, one, other in (("NaN", values.a.n_nan, values.b.n_nan), ("Inf", values.a.n_inf, values.b.n_inf)):
            notes += [f"{name} {one:,} → {other:,}"] if one != other else []
    if values.n_elements == 1 and values.first_a is not None and values.first_b is not None:
        notes.append(f"{_short(values.first_a)} → {_short(values.first_b)}")
    return ", ".join(notes)


def _short(number: complex) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:.4g}"


def diff_json(report: DiffReport) -> dict[str, Any]:
    """Return the report as plain data; the layout is documented in docs/json.md and numbered by "schema"."""
    fields = report._asdict()
    for name in ("a", "b", "alignment"):
        fields[name] = fields[name] and fields[name]._asdict()
    for name in ("only_in_a", "only_in_b", "renames"):
        fields[name] = [entry._asdict() for entry in fields[name]]
    for name in ("unreadable", "notes"):
        fields[name] = [finding_json(finding) for finding in fields[name]]
    fields["differences"] = [
        {**difference._asdict(), "values": difference.values and _values_json(difference.values)}
        for difference in report.differences
    ]
    return {"schema": SCHEMA, "equal": report.equal, **fields}


def _values_json(values: Values) -> dict[str, Any]:
    fields = {name: _number(value) for name, value in values._asdict().items()}
    return {**fields, "a": _statistics_json(values.a), "b": _statistics_json(values.b)}


def _statistics_json(statistics: Statistics | None) -> dict[str, Any] | None:
    return statistics and {name: _number(value) for name, value in statistics._asdict().items()}


def _number(value: Any) -> Any:
    """Return a number for JSON; as text where JSON has no form for it."""
    if isinstance(value, complex) or (isinstance(value, float) and value - value != 0):
        return str(value)
    return value
