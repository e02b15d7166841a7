"""CPU time to check the cover of one tensor, by number and kind of its boxes; growth should be near-linear.

    python -m benchmarks.cover                     all kinds at 10 k, 100 k and 1 M boxes
    python -m benchmarks.cover bricks --sizes 1000,10000

Each kind is run exact, and with one hole and one overlap.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise, product

import click
from tabulate import tabulate

from dcptool.checkpoint.chunks import Chunks, ChunkTable
from dcptool.checkpoint.cover import cover
from dcptool.checkpoint.extents import Ints
from dcptool.checkpoint.regions import Box

Layout = tuple[Ints, list[Box]]
"""Shape of a tensor and an exact cover of it, in elements."""


def shards(count: int, draw: random.Random) -> Layout:
    """Uneven shards of rows, in any order."""
    boxes = [((start, 0), (stop - start, 64)) for start, stop in _cuts(4 * count, count, draw)]
    draw.shuffle(boxes)
    return (4 * count, 64), boxes


def grid(ndim: int) -> Callable[[int, random.Random], Layout]:
    """Return a maker of regular grids."""

    def make(count: int, draw: random.Random) -> Layout:
        side = round(count ** (1 / ndim))
        cells = product(range(0, 4 * side, 4), repeat=ndim)
        return (4 * side,) * ndim, [(cell, (4,) * ndim) for cell in cells]

    return make


def bands(count: int, draw: random.Random) -> Layout:
    """Bands of rows, each cut into columns of its own."""
    side = round(count**0.5)
    cuts = ((row, _cuts(8 * count, side, draw)) for row in range(side))
    return (side, 8 * count), [((row, start), (1, stop - start)) for row, cut in cuts for start, stop in cut]


def bricks(count: int, draw: random.Random) -> Layout:
    """Rows of equal boxes, every other row moved by half a box."""
    side = round(count**0.5)
    boxes = []
    for row in range(side):
        cuts = [0, *range(1 + row % 2, 2 * side, 2), 2 * side] if row % 2 == 0 else range(0, 2 * side + 1, 2)
        boxes += [((row, start), (1, stop - start)) for start, stop in pairwise(cuts)]
    return (side, 2 * side), boxes


def pinwheels(count: int, draw: random.Random) -> Layout:
    """Squares of five boxes around one another, no line of which can be cut; the squares are of different sizes."""
    side = round((count / 5) ** 0.5)
    boxes: list[Box] = []
    for (top, bottom), (left, right) in product(_cuts(8 * side, side, draw, 3), repeat=2):
        boxes += [
            ((top, left), (1, right - left - 1)),
            ((top, right - 1), (bottom - top - 1, 1)),
            ((bottom - 1, left + 1), (1, right - left - 1)),
            ((top + 1, left), (bottom - top - 1, 1)),
            ((top + 1, left + 1), (bottom - top - 2, right - left - 2)),
        ]
    return (8 * side, 8 * side), boxes


def splits(ndim: int) -> Callable[[int, random.Random], Layout]:
    """Return a maker of boxes that are split in two again and again, along any dimension at any place."""

    def make(count: int, draw: random.Random) -> Layout:
        shape = (round((64 * count) ** (1 / ndim)) + 64,) * ndim
        open_boxes, boxes = [((0,) * ndim, shape, count)], []
        while open_boxes:
            offsets, sizes, parts = open_boxes.pop()
            dim = max(range(ndim), key=lambda dim: (sizes[dim] > 1, draw.random()))
            if parts == 1 or sizes[dim] == 1:
                boxes.append((offsets, sizes))
                continue
            first = draw.randint(max(1, sizes[dim] // 3), max(1, sizes[dim] - sizes[dim] // 3 - 1))
            for start, size, share in ((0, first, parts // 2), (first, sizes[dim] - first, parts - parts // 2)):
                moved = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
                open_boxes.append((moved, (*sizes[:dim], size, *sizes[dim + 1 :]), share))
        return shape, boxes

    return make


KINDS: dict[str, Callable[[int, random.Random], Layout]] = {
    "shards": shards,
    "grid-2d": grid(2),
    "grid-3d": grid(3),
    "bands": bands,
    "bricks": bricks,
    "pinwheels": pinwheels,
    "splits-2d": splits(2),
    "splits-3d": splits(3),
}


def _cuts(size: int, count: int, draw: random.Random, least: int = 1) -> list[tuple[int, int]]:
    """Cut 0 to `size` into `count` intervals of at least `least`."""
    inner = sorted(draw.sample(range(1, size - count * (least - 1)), count - 1))
    cuts = [0, *(cut + (i + 1) * (least - 1) for i, cut in enumerate(inner)), size]
    return list(pairwise(cuts))


def damage(boxes: list[Box]) -> list[Box]:
    """Drop the box in the middle and add a larger twin of the first: a hole and an overlap."""
    at = len(boxes) // 2
    offsets, sizes = boxes[0]
    return [*boxes[:at], *boxes[at + 1 :], (offsets, tuple(size + 1 for size in sizes))]


def chunks_of(shape: Ints, boxes: list[Box]) -> Chunks:
    """Put boxes into a table, all in one file."""
    table = ChunkTable()
    mark = table.mark()
    table.extend(boxes, ["data"] * len(boxes), range(len(boxes)), [1] * len(boxes))
    return table.chunks_since(mark, len(shape))


def measure(kind: str, sizes: list[int], seed: int) -> Iterator[dict[str, str | int | float | bool]]:
    """Yield CPU seconds of one kind at each number of boxes, exact and damaged."""
    for damaged in (False, True):
        for size in sizes:
            shape, boxes = KINDS[kind](size, random.Random(seed))
            chunks = chunks_of(shape, damage(boxes) if damaged else boxes)
            count = len(boxes)
            del boxes
            began = time.process_time()
            result = cover(shape, chunks)
            seconds = time.process_time() - began
            assert bool(result.n_missing) == bool(result.n_overlapping) == damaged, result
            yield {"kind": kind, "damaged": damaged, "boxes": count, "seconds": seconds}


@click.command(help="Time the cover of a tensor by kinds of boxes; all of them unless some are named.")
@click.argument("kinds", nargs=-1, metavar="[KIND]...", type=click.Choice(list(KINDS)))
@click.option("--sizes", default="10000,100000,1000000", show_default=True, help="Numbers of boxes.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print all measurements as JSON.")
def main(kinds: tuple[str, ...], sizes: str, seed: int, as_json: bool) -> None:
    numbers = [int(size) for size in sizes.split(",")]
    found = [row for kind in kinds or KINDS for row in measure(kind, numbers, seed)]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    rows = []
    for start in range(0, len(found), len(numbers)):
        series = found[start : start + len(numbers)]
        seconds = [float(row["seconds"]) for row in series]
        growth = [f"× {after / before:.1f}" for before, after in pairwise(seconds)]
        name = f"{series[0]['kind']}{', damaged' if series[0]['damaged'] else ''}"
        rows.append([name, *(f"{value:.3f}" for value in seconds), *growth])
    headers = ["boxes, CPU seconds", *(f"{number:,}" for number in numbers), *["growth"] * (len(numbers) - 1)]
    click.echo(tabulate(rows, headers, disable_numparse=True, colalign=["left", *["right"] * (2 * len(numbers) - 1)]))


if __name__ == "__main__":
    main()
