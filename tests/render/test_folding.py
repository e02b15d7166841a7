"""Folding of names that differ in numbers only."""

from __future__ import annotations

import pytest

from dcptool.render.folding import fold

pytestmark = pytest.mark.torchfree


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"l.{i}.w" for i in range(40)], ["l.{0–39}.w"]),
        ([f"l.{i}.e.{j}.w" for i in range(4) for j in range(3)], ["l.{0–3}.e.{0–2}.w"]),
        (["l.0.w", "l.2.w", "l.5.w"], ["l.{*}.w"]),
        (["l.0.0", "l.1.1", "l.2.2"], ["l.{*}.{*}"]),
        (["l.0.w", "l.1.w"], ["l.0.w", "l.1.w"]),
        (["a", "l.1.w", "l.2.w", "l.3.w", "z"], ["a", "l.{1–3}.w", "z"]),
        (["conv2.w", "conv3.w", "conv4.w"], ["conv2.w", "conv3.w", "conv4.w"]),
        (["0", "1", "2"], ["{0–2}"]),
        (["l.7.x.0", "l.7.x.1", "l.7.x.2"], ["l.7.x.{0–2}"]),
        ([], []),
    ],
)
def test_names(names, expected):
    folds = fold(names, [0] * len(names))
    assert [found.name for found in folds] == expected
    assert sorted(index for found in folds for index in found.indexes) == list(range(len(names)))


def test_only_what_is_alike_folds():
    names = [f"l.{index}.w" for index in range(8)]
    folds = fold(names, ["big"] * 4 + ["small"] * 4)
    assert [found.name for found in folds] == ["l.{0–3}.w", "l.{4–7}.w"]
