"""Which boxes a mesh gives, and what the rules make of a checkpoint's own: against torch.chunk and DTensor."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcptool
from dcptool.checkpoint.layouts import Layout
from dcptool.checkpoint.layouts import Shard as LayoutShard
from dcptool.checkpoint.regions import first_gap, volume
from dcptool.errors import LayoutError
from dcptool.ops.reshard.assign import Held, Holding, assign
from dcptool.ops.reshard.mesh import Mesh, MeshCut, boxes_of, mislabelled, parse_mesh, parse_placement
from dcptool.ops.reshard.plan import ReshardOptions, make_plan, options_problem
from dcptool.ops.reshard.rules import mesh_hint
from dcptool.ops.reshard.source import default_target
from tests.alone import reshard_alone
from tests.conftest import FOREIGN
from tests.damage import copy, edit_metadata

torch = pytest.importorskip("torch")
from torch.distributed.tensor import Shard as TorchShard  # noqa: E402
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.placement_types import Replicate, _StridedShard  # noqa: E402

from tests.ranks import Shard, save  # noqa: E402

NAMES = ("a", "b", "c")


@st.composite
def cases(draw):
    """A shape, a mesh, and cuts in any order, some mesh dims replicating or folded."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    sizes = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    mesh = Mesh(NAMES[: len(sizes)], sizes)
    order = draw(st.permutations(mesh.names))
    cuts = []
    while order:
        take = draw(st.integers(1, len(order)))
        names, order = tuple(order[:take]), order[take:]
        if draw(st.booleans()):
            cuts.append(MeshCut(names, draw(st.integers(0, len(shape) - 1))))
    return shape, mesh, tuple(cuts)


@settings(max_examples=300)
@given(cases())
def test_boxes_are_nested_torch_chunks(case):
    shape, mesh, cuts = case
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate, (offsets, sizes) in zip(mesh.coordinates(), boxes_of(shape, mesh, cuts), strict=True):
        part = whole
        for cut in cuts:
            count = index = 0
            dims = [mesh.names.index(name) for name in cut.mesh_dims]
            count = math.prod(mesh.sizes[dim] for dim in dims)
            for dim in dims:
                index = index * mesh.sizes[dim] + coordinate[dim]
            pieces = torch.chunk(part, count, cut.dim)
            empty = part.narrow(cut.dim, 0, 0)
            part = pieces[index] if index < len(pieces) else empty
        assert tuple(part.shape) == sizes
        if part.numel():
            box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            assert torch.equal(whole[box], part)
        assert all(start >= 0 and start + size <= n for start, size, n in zip(offsets, sizes, shape, strict=True))


@settings(max_examples=200)
@given(cases())
def test_boxes_cover_the_tensor_exactly(case):
    shape, mesh, cuts = case
    full = {box for box in boxes_of(shape, mesh, cuts) if 0 not in box[1]}
    assert sum(volume(sizes) for _, sizes in full) == volume(shape)
    assert first_gap(((0,) * len(shape), shape), list(full)) is None


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    st.randoms(use_true_random=False),
)
def test_boxes_are_those_of_dtensor_in_mesh_order(shape, sizes, chance: random.Random):
    mesh = Mesh(NAMES[: len(sizes)], sizes)
    dims = [chance.randrange(-1, len(shape)) for _ in sizes]
    placements = [Replicate() if dim < 0 else TorchShard(dim) for dim in dims]
    cuts = [MeshCut((name,), dim) for name, dim in zip(mesh.names, dims, strict=True) if dim >= 0]
    theirs = [
        _compute_local_shape_and_global_offset(shape, sizes, list(place), placements) for place in mesh.coordinates()
    ]
    assert boxes_of(shape, mesh, cuts) == [(tuple(offsets), tuple(local)) for local, offsets in theirs]


def test_fsdp_over_tensor_parallelism_is_dtensor_or_named_as_mislabelled():
    """FORMAT F5: a strided shard and a plain one on the same dimension.

    DTensor's boxes can cover the tensor exactly and still be other ones than FSDP2 holds: 17 rows on a 4 × 2 mesh.
    """
    wrong = 0
    for dp, tp, rows in itertools.product(range(1, 6), range(1, 6), range(40)):
        mesh = Mesh(("dp", "tp"), (dp, tp))
        cuts = (MeshCut(("tp",), 0), MeshCut(("dp",), 0))
        placements = [_StridedShard(0, split_factor=tp), TorchShard(0)]
        found = [
            _compute_local_shape_and_global_offset((rows,), (dp, tp), list(place), placements)
            for place in mesh.coordinates()
        ]
        theirs = [(tuple(offsets), tuple(local)) for local, offsets in found]
        ours = boxes_of((rows,), mesh, cuts)
        same = ours == theirs
        assert (mislabelled((rows,), mesh, cuts) is None) == same
        assert same or rows % tp
        wrong += not same
    assert wrong


class TestAsWritten:
    def test_mesh_and_placement(self):
        mesh = parse_mesh("dp=6, tp=8")
        assert (mesh.names, mesh.sizes, mesh.n_ranks) == (("dp", "tp"), (6, 8), 48)
        placement = parse_placement("*.a=b.weight=tp:1,dp:-2", mesh)
        assert placement.glob == "*.a=b.weight"
        assert placement.cuts == (MeshCut(("tp",), 1), MeshCut(("dp",), -2))
        assert parse_placement("x=dp+tp:0", mesh).cuts == (MeshCut(("dp", "tp"), 0),)
        assert parse_placement("x=", mesh).cuts == ()

    @pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=x", "dp=2,dp=3", "dp=2,,tp=2", "dp=9999999", "4"])
    def test_no_mesh(self, text):
        with pytest.raises(LayoutError, match="--mesh"):
            parse_mesh(text)

    @pytest.mark.parametrize("text", ["", "=dp:0", "x", "x=dp", "x=dp:a", "x=pp:0", "x=dp:0,dp:1", "x=dp+dp:0"])
    def test_no_placement(self, text):
        with pytest.raises(LayoutError, match="--placement"):
            parse_placement(text, Mesh(("dp",), (2,)))

    @pytest.mark.parametrize(
        "options",
        [
            ReshardOptions(),
            ReshardOptions(like="x", files=2),
            ReshardOptions(2, placements=("*=dp:0",)),
            ReshardOptions(mesh="dp="),
            ReshardOptions(mesh="dp=2", placements=("*=tp:0",)),
        ],
    )
    def test_what_does_not_go_together(self, options):
        assert options_problem(options)
        with pytest.raises(LayoutError):
            make_plan(str(FOREIGN / "xver_t2130"), "/nowhere/at/all", options)

    def test_world_size_must_be_that_of_the_mesh(self):
        with pytest.raises(LayoutError, match="--world-size 4 contradicts"):
            make_plan(str(FOREIGN / "xver_t2130"), "/nowhere/at/all", ReshardOptions(4, mesh="dp=2"))

    def test_default_target(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert default_target("ckpt/step_500", 48) == "ckpt-ws48/step_500"
        assert default_target("ckpt/step_500/", 4) == "ckpt-ws4/step_500"
        assert default_target("s3://bucket/run/step_1", 8) == "s3://bucket/run-ws8/step_1"
        assert default_target("step_1", 8) == f"{tmp_path}-ws8/step_1"
        assert default_target("runs/model.pt", 8) == "runs-ws8/model"


def boxes(path) -> dict[str, list]:
    found = dcptool.open(path)
    return {fqn: list(entry.chunks.boxes()) for fqn, entry in found.tensors.items()}


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Four ranks: sharded along each dimension, uneven, tiny, empty, whole, 0-d, and objects of each rank."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"rows": (10, 3), "cols": (3, 9), "three": (3, 2), "one": (1, 4), "none": (0, 3), "vector": (7,)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    dims = {"cols": 1}
    states = []
    for rank in range(4):
        state = {name: Shard.of(tensor, rank, 4, dims.get(name, 0)) for name, tensor in tensors.items()}
        whole = {"whole": torch.arange(8.0), "scalar": torch.tensor(3), "step": 7}
        states.append({**state, **whole, f"dl.rank{rank}": {"at": rank}})
    return save(tmp_path_factory.mktemp("four") / "step_1", *states), tensors


class TestDefaultRule:
    @pytest.mark.parametrize("n_ranks", [2, 3, 4, 5, 7, 48])
    def test_a_sharded_dimension_stays_it_and_comes_back(self, four, tmp_path, n_ranks):
        source, tensors = four
        done = reshard_alone(source, tmp_path / "there", world_size=n_ranks)
        assert done.world_size == n_ranks
        assert sorted(path.name for path in (tmp_path / "there").glob("*.distcp")) == sorted(
            f"__{rank}_0.distcp" for rank in range(n_ranks)
        )
        there = boxes(tmp_path / "there")
        row = Mesh(("r",), (n_ranks,))
        for name, tensor in tensors.items():
            wanted = boxes_of(tuple(tensor.shape), row, (MeshCut(("r",), int(name == "cols")),))
            assert sorted(there[name]) == sorted(set(wanted)), name
            assert np.array_equal(dcptool.open(tmp_path / "there").read(name), tensor.numpy())
        assert there["whole"] == [((0,), (8,))]
        assert dcptool.compare(source, tmp_path / "there").equal
        reshard_alone(tmp_path / "there", tmp_path / "back", world_size=4)
        assert {name: sorted(held) for name, held in boxes(tmp_path / "back").items()} == {
            name: sorted(held) for name, held in boxes(source).items()
        }
        assert dcptool.compare(source, tmp_path / "back").equal

    def test_one_rank_and_back_with_like(self, four, tmp_path):
        source, _ = four
        reshard_alone(source, tmp_path / "one", world_size=1)
        assert all(len(held) == 1 for held in boxes(tmp_path / "one").values())
        reshard_alone(tmp_path / "one", tmp_path / "back", like=str(source))
        assert boxes(tmp_path / "back") == boxes(source)
        files = {
            fqn: [chunk.item.file for chunk in entry.chunks] for fqn, entry in dcptool.open(source).tensors.items()
        }
        found = dcptool.open(tmp_path / "back").tensors
        assert {fqn: [chunk.item.file for chunk in entry.chunks] for fqn, entry in found.items()} == files
        assert dcptool.compare(source, tmp_path / "back").equal

    def test_one_rank_is_sharded_along_its_first_dimension(self, tmp_path):
        save(tmp_path / "one", {"w": torch.randn(5, 2), "s": torch.tensor(1)})
        reshard_alone(tmp_path / "one", tmp_path / "four", world_size=4)
        assert [box[0][0] for box in boxes(tmp_path / "four")["w"]] == [0, 2, 4, 5]

    def test_two_sharded_dimensions_keep_their_boxes_and_the_note_says_which_mesh(self, tmp_path):
        reshard_alone(FOREIGN / "mesh2d_fsdp_tp", tmp_path / "out", world_size=8)
        plan = make_plan(str(FOREIGN / "mesh2d_fsdp_tp"), str(tmp_path / "x"), ReshardOptions(8))
        kept = ["model.w2.weight", "optim.state.w2.weight.exp_avg", "optim.state.w2.weight.exp_avg_sq"]
        assert {fqn: sorted(held) for fqn, held in boxes(tmp_path / "out").items() if fqn in kept} == {
            fqn: sorted(held) for fqn, held in boxes(FOREIGN / "mesh2d_fsdp_tp").items() if fqn in kept
        }
        assert any("keep their boxes" in note for note in plan.notes)
        note = next(note for note in plan.notes if note.startswith("--mesh dp=4,tp=2 --placement 'GLOB=tp:"))
        assert "would cut 3 tensors as 8 ranks do: 'model.w2.weight', " in note

    def test_the_mesh_is_told_of_tensors_that_have_its_dimensions_only(self):
        rows = LayoutShard(0, 2)
        kept = {
            "flat": Layout(3, is_grid=False),
            "a": Layout(4, (rows, LayoutShard(2, 2))),
            "b": Layout(4, (rows, LayoutShard(1, 2))),
        }
        hint = "--mesh dp=4,tp=2 --placement 'GLOB=tp:1,dp:0'"
        assert mesh_hint({**kept, "c": kept["b"]}, 8) == (hint, ["b", "c"])
        assert mesh_hint({"a": kept["a"], "flat": kept["flat"]}, 8)[1] == ["a"]
        assert mesh_hint(kept, 7) == ("", [])

    def test_no_rule_reads_the_words_of_a_layout(self, tmp_path, monkeypatch):
        source, target = str(FOREIGN / "mesh2d_fsdp_tp"), str(tmp_path / "x")
        before = make_plan(source, target, ReshardOptions(3)).parts[0].arrangement
        monkeypatch.setattr(LayoutShard, "__str__", lambda self: "?")
        assert make_plan(source, target, ReshardOptions(3)).parts[0].arrangement == before

    def test_objects_of_single_ranks_are_copied_and_told(self, four, tmp_path):
        source, _ = four
        more = make_plan(str(source), str(tmp_path / "x"), ReshardOptions(6)).notes
        assert any("dl.rankN.at of ranks 0–3" in note and "ranks 4–5 (2)" in note for note in more)
        fewer = make_plan(str(source), str(tmp_path / "x"), ReshardOptions(2)).notes
        assert any("that of 2 ranks belongs to no rank any more" in note for note in fewer)
        reshard_alone(source, tmp_path / "two", world_size=2)
        found = dcptool.open(tmp_path / "two")
        assert [found.value(f"dl.rank{rank}.at") for rank in range(4)] == [0, 1, 2, 3]


class TestMesh:
    def test_optimizer_follows_its_parameter(self, tmp_path):
        state = {
            "model": {"a": {"weight": torch.randn(8, 6)}, "b": {"weight": torch.randn(8, 6)}},
            "optim": {
                "state": {
                    "a.weight": {"exp_avg": torch.randn(8, 6), "step": torch.tensor(1.0)},
                    "b.weight": {"exp_avg": torch.randn(8, 6), "factored": torch.randn(8)},
                }
            },
        }
        save(tmp_path / "one", state)
        options = {"mesh": "dp=2,tp=2", "placements": ("model.a.weight=tp:1,dp:0", "model.*=dp:0")}
        plan = make_plan(str(tmp_path / "one"), str(tmp_path / "x"), ReshardOptions(**options))
        held = plan.parts[0].arrangement.boxes
        assert len(held["model.a.weight"]) == 4
        assert held["optim.state.a.weight.exp_avg"] == held["model.a.weight"]
        assert len(held["model.b.weight"]) == 2
        assert held["optim.state.b.weight.exp_avg"] == held["model.b.weight"]
        assert any("'optim.state.b.weight.factored'" in note for note in plan.notes)
        assert not any("step" in note for note in plan.notes)

    def test_a_dimension_that_is_not_there(self):
        with pytest.raises(LayoutError, match=r"'model.ema' has shape \[5\] and no dimension 1"):
            make_plan(
                str(FOREIGN / "xver_t2130"), "/nowhere/x", ReshardOptions(mesh="dp=2", placements=("model.*=dp:1",))
            )

    def test_what_torch_would_mislabel_is_refused(self, tmp_path):
        save(tmp_path / "one", {"w": torch.randn(7, 2)})
        options = ReshardOptions(mesh="dp=3,tp=2", placements=("w=tp:0,dp:0",))
        with pytest.raises(LayoutError, match=r"'w': 7 elements of dimension 0 do not divide over tp"):
            make_plan(str(tmp_path / "one"), str(tmp_path / "x"), options)


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 9)), max_size=40))
def test_what_all_ranks_hold_goes_to_the_first_that_has_least(n_ranks, items):
    """Against looking at every rank each time; some items are held by one rank alone."""
    held, planned, expected = [], [0] * n_ranks, {}
    for number, (weight, rank) in enumerate(items):
        ranks = range(n_ranks) if rank < 0 else (rank % n_ranks,)
        held.append(Held(str(number), weight, [Holding(((), ()), ranks)]))
    # Each rank proposes what it is the first to hold.
    for item in sorted(held, key=lambda item: item.holdings[0].ranks[0]):
        chosen = min(item.holdings[0].ranks, key=planned.__getitem__)
        planned[chosen] += item.weight or 1
        expected[item.name] = chosen
    files = assign(held, n_ranks).files
    assert expected == {name: rank for rank in range(n_ranks) for name, _ in files[f"__{rank}_0.distcp"]}


def test_a_tensor_without_any_chunk_stays_one(tmp_path):
    """A tensor of no elements needs no chunk; whatever the layout, it is still named in the output."""
    shard = [{"w": Shard.of(torch.ones(4), rank, 2), "none": torch.zeros(0, 3)} for rank in range(2)]
    source = save(tmp_path / "source", *shard)

    def remove(metadata):
        metadata.state_dict_metadata["none"].chunks.clear()
        metadata.storage_data = {key: place for key, place in metadata.storage_data.items() if key.fqn != "none"}

    edit_metadata(source, remove)
    for number, options in enumerate(({"world_size": 3}, {"files": 2}, {"like": str(source)})):
        out = tmp_path / str(number)
        reshard_alone(source, out, **options)
        assert dcptool.open(out).tensors["none"].shape == (0, 3)
        assert dcptool.compare(source, out).equal


class TestFiles:
    @pytest.mark.parametrize("n_files", [1, 2, 3, 9])
    def test_boxes_stay(self, four, tmp_path, n_files):
        source, _ = four
        reshard_alone(source, tmp_path / "out", files=n_files)
        found = {name: sorted(held) for name, held in boxes(tmp_path / "out").items()}
        assert found == {name: sorted(held) for name, held in boxes(source).items()}
        assert len(list((tmp_path / "out").glob("*.distcp"))) == n_files
        assert dcptool.compare(source, tmp_path / "out").equal


class TestLike:
    def test_another_shape_is_refused(self, tmp_path):
        save(tmp_path / "a", {"w": torch.zeros(4, 2), "v": torch.zeros(3)})
        save(tmp_path / "b", {"w": torch.zeros(4, 3), "v": 1})
        with pytest.raises(LayoutError, match=r"'w' has shape \[4, 2\], there \[4, 3\]\n'v' is a tensor in one"):
            make_plan(str(tmp_path / "a"), str(tmp_path / "x"), ReshardOptions(like=str(tmp_path / "b")))

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda chunks: chunks.pop(), "no chunk holds 3 of its 30"),
            (lambda chunks: chunks.insert(0, replace(chunks.pop(0), sizes=torch.Size([4, 3]))), "chunks overlap"),
            (lambda chunks: chunks.append(replace(chunks.pop(), sizes=torch.Size([3, 3]))), "leaves its shape"),
        ],
    )
    def test_a_layout_that_is_no_exact_cover_is_refused(self, four, tmp_path, change, said):
        source, _ = four
        broken = copy(source, tmp_path / "broken")
        edit_metadata(broken, lambda metadata: change(metadata.state_dict_metadata["rows"].chunks))
        with pytest.raises(LayoutError, match=f"--like .*broken is damaged.*\n.*{said}"):
            reshard_alone(source, tmp_path / "out", like=str(broken))
        assert not (tmp_path / "out").exists()

    def test_what_the_other_lacks_is_told(self, four, tmp_path):
        source, _ = four
        save(tmp_path / "b", {"rows": torch.zeros(10, 3)})
        plan = make_plan(str(source), str(tmp_path / "x"), ReshardOptions(like=str(tmp_path / "b")))
        assert any("lacks" in note for note in plan.notes)


def test_cover_of_everything_planned(tmp_path):
    """What is planned for any whole part, at any size, covers every tensor exactly and once."""
    for name, n_ranks in itertools.product(("xver_t2130", "mesh2d_fsdp_tp", "hsdp"), (1, 3, 48)):
        plan = make_plan(str(FOREIGN / name), str(tmp_path / "x"), ReshardOptions(n_ranks))
        stored = [
            (fqn, box[0]) for held in plan.parts[0].arrangement.files.values() for fqn, box in held if box is not None
        ]
        assert len(stored) == len(set(stored))
        for fqn, entry in plan.parts[0].source.tensors.items():
            held = [box for box in plan.parts[0].arrangement.boxes[fqn] if 0 not in box[1]]
            assert sum(volume(sizes) for _, sizes in held) == volume(entry.shape)
            assert first_gap(((0,) * len(entry.shape), entry.shape), held) is None
