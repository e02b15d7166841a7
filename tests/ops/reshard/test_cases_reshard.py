"""Cases of people who come back with another number of ranks, as far as reshard goes.

Layouts of real jobs are held against torch in test_reshard_oracle and test_reshard_rules; R25 and R60 for convert in
test_cases_convert.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import dcptool
from dcptool.errors import DcptoolError, ItemError
from dcptool.ops.guards import require_same
from dcptool.ops.reshard import member
from dcptool.storage.local import LocalSink
from tests import damage
from tests.alone import reshard_alone
from tests.conftest import FOREIGN

torch = pytest.importorskip("torch")
import torch.distributed.checkpoint as dcp  # noqa: E402

from tests.ranks import Shard, save  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
DEEP = dcptool.VerifyOptions(level=dcptool.Level.DEEP)


def boxes(path: Path, fqn: str) -> dict[str, list]:
    """The boxes of a tensor by the file that holds them, in the order of the metadata."""
    found: dict[str, list] = {}
    for chunk in dcptool.open(path)[fqn].chunks:
        found.setdefault(chunk.item.file, []).append((list(chunk.offsets), list(chunk.sizes)))
    return found


def files_of_objects(path: Path) -> dict[str, str]:
    return {fqn: entry.item.file for fqn, entry in dcptool.open(path).objects.items()}


class Part(Shard):
    """Any box of a tensor as what one rank holds."""

    @staticmethod
    def box(whole: torch.Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Shard:
        index = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        part = whole[index].clone().as_subclass(Shard)
        part.offsets, part.whole = offsets, whole.shape
        return part


def four(**more) -> list[dict]:
    return [
        {
            "w": Shard.of(torch.arange(24.0).reshape(12, 2), rank, 4),
            "obj": rank,
            f"dl.rank{rank}": {"pos": rank},
            **more,
        }
        for rank in range(4)
    ]


def test_r17_state_of_single_ranks_stays_with_its_rank(tmp_path):
    source = save(tmp_path / "c", *four())
    done = reshard_alone(source, tmp_path / "out", world_size=4)
    written = dcptool.open(tmp_path / "out")
    assert [written.value(f"dl.rank{rank}.pos") for rank in range(4)] == [0, 1, 2, 3]
    found = files_of_objects(tmp_path / "out")
    assert [found[f"dl.rank{rank}.pos"] for rank in range(4)] == [f"__{rank}_0.distcp" for rank in range(4)]
    assert list(written.objects).count("obj") == 1
    assert any(
        "dl.rankN.pos of ranks 0–3 (4) cannot be resharded and is copied as it is" in note for note in done.notes
    )


@pytest.mark.parametrize(
    ("n_ranks", "words"),
    [
        (6, "a resume on 6 ranks finds none for ranks 4–5 (2)"),
        (5, "a resume on 5 ranks finds none for rank 4"),
        (2, "that of 2 ranks belongs to no rank any more"),
    ],
)
def test_r18_what_a_resume_misses_is_told(tmp_path, n_ranks, words):
    source = save(tmp_path / "c", *four())
    done = reshard_alone(source, tmp_path / "out", world_size=n_ranks)
    assert any(words in note for note in done.notes), done.notes
    assert dcptool.compare(source, tmp_path / "out").equal  # nothing is dropped


def test_r25_a_hole_is_refused_never_filled(tmp_path):
    source = save(tmp_path / "c", {"w": torch.arange(8.0), "v": torch.ones(2)})

    def widen(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size((12,))

    damage.edit_metadata(source, widen)
    for options in ({"world_size": 3}, {"files": 2}, {"mesh": "dp=3", "placements": ("*=dp:0",)}):
        with pytest.raises(DcptoolError, match=r"'w': no chunk holds 4 of its 12 elements"):
            reshard_alone(source, tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    reshard_alone(source, tmp_path / "out", world_size=3, keys=("v",))
    assert list(dcptool.open(tmp_path / "out")) == ["v"]


def test_r26_a_rank_local_save_becomes_an_ordinary_one(tmp_path):
    source = FOREIGN / "w_no_collectives"
    reshard_alone(source, tmp_path / "out", world_size=3, check=True, rank=0)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [".metadata", "_COMPLETE", *(f"__{rank}_0.distcp" for rank in range(3))]
    assert dcptool.compare(source, tmp_path / "out").equal
    weight = torch.zeros(11, 6)
    dcp.load({"model": {"embed": {"weight": weight}}}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert weight.numpy().tobytes() == dcptool.open(source).read("model.embed.weight").tobytes()


@pytest.mark.parametrize("n_ranks", [1, 3, 5, 7, 16])
def test_r27_rows_that_some_ranks_lack(tmp_path, n_ranks):
    whole = {"six": torch.randn(6, 2), "one": torch.randn(1, 3), "none": torch.empty(0, 3)}
    states = [{name: Shard.of(tensor, rank, 4) for name, tensor in whole.items()} for rank in range(4)]
    source = save(tmp_path / "c", *states)
    reshard_alone(source, tmp_path / "out", world_size=n_ranks)
    like = save(
        tmp_path / "like",
        *({name: Shard.of(tensor, rank, n_ranks) for name, tensor in whole.items()} for rank in range(n_ranks)),
    )
    for name in whole:
        assert boxes(tmp_path / "out", name) == boxes(like, name)
    loaded = {name: torch.full_like(tensor, -1) for name, tensor in whole.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(loaded[name], whole[name]) for name in whole)
    assert dcptool.verify(tmp_path / "out", DEEP).good


def test_r30_replicas_go_where_a_save_of_that_size_puts_them(tmp_path):
    def states(count):
        return [
            {"w": Shard.of(torch.arange(24.0).reshape(12, 2), rank, count)}
            | {f"scalar.{index}": torch.tensor(float(index)) for index in range(8)}
            for rank in range(count)
        ]

    source = save(tmp_path / "c", *states(4))
    reshard_alone(source, tmp_path / "out", world_size=3)
    like = save(tmp_path / "like", *states(3))
    for fqn in dcptool.open(like):
        assert boxes(tmp_path / "out", fqn) == boxes(like, fqn)
    reshard_alone(source, tmp_path / "one", world_size=1)  # all that any rank needs, in one file
    assert set(dcptool.open(tmp_path / "one").usage) == {"__0_0.distcp"}


def test_r31_replicas_are_stored_once_and_bytes_are_balanced(tmp_path):
    whole = {f"w{index}": torch.randn(64, 64) for index in range(4)}
    plain = {f"copy{index}": torch.randn(32, 64) for index in range(4)}
    source = save(
        tmp_path / "c", *({n: Shard.of(t, rank % 2, 2) for n, t in whole.items()} | plain for rank in range(4))
    )
    done = reshard_alone(source, tmp_path / "out", world_size=4)
    values = 6 * 64 * 64 * 4
    assert done.nbytes == values
    assert values < sum(done.rank_nbytes) < 1.2 * values  # not twice
    assert max(done.rank_nbytes) < 1.5 * sum(done.rank_nbytes) / 4


def test_r53_boxes_decide_not_values(tmp_path):
    source = save(
        tmp_path / "c",
        *({"norm": Shard.of(torch.ones(8), r, 4), "copy": torch.ones(2), "zero": torch.tensor(1.0)} for r in range(4)),
    )
    reshard_alone(source, tmp_path / "out", world_size=2)
    assert boxes(tmp_path / "out", "norm") == {"__0_0.distcp": [([0], [4])], "__1_0.distcp": [([4], [4])]}
    assert list(boxes(tmp_path / "out", "copy").values()) == [[([0], [2])]]
    assert dcptool.open(tmp_path / "out").read("zero").shape == ()
    assert dcptool.compare(source, tmp_path / "out").equal


def test_r54_offsets_decide_not_the_order_of_files(tmp_path):
    rows, grid = torch.arange(48.0).reshape(8, 6), torch.arange(24.0).reshape(4, 6)
    order = (2, 0, 3, 1)  # rank → which quarter it holds
    states = [
        {
            "rows": Part.box(rows, (2 * order[rank], 0), (2, 6)),
            "grid": Part.box(grid, (2 * (rank // 2), 3 * (rank % 2)), (2, 3)),
        }
        for rank in range(4)
    ]
    source = save(tmp_path / "c", *states)
    options = (
        {"world_size": 3},
        {"world_size": 2},
        {"files": 2},
        {"mesh": "dp=2,tp=3", "placements": ("*=tp:1,dp:0",)},
    )
    for index, option in enumerate(options):
        reshard_alone(source, tmp_path / str(index), check=True, **option)
        written = dcptool.open(tmp_path / str(index))
        assert written.read("rows").tolist() == rows.tolist()
        assert written.read("grid").tolist() == grid.tolist()
    assert boxes(tmp_path / "1", "rows") == {"__0_0.distcp": [([0, 0], [4, 6])], "__1_0.distcp": [([4, 0], [4, 6])]}


def test_r58_what_was_written_is_counted_and_looked_at(tmp_path, monkeypatch):
    source = save(tmp_path / "c", *four())
    done = reshard_alone(source, tmp_path / "out", world_size=3, check=True)
    assert (done.n_tensors, done.n_objects, done.nbytes, done.published) == (1, 5, 96, True)
    there = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert sum(there.values()) == done.nbytes_out
    assert [there[f"__{rank}_0.distcp"] for rank in range(3)] == list(done.rank_nbytes)
    real = LocalSink._write

    def lossy(self, rest):  # a file system that says it has written
        real(self, rest[:-4] if self._path.endswith("__1_0.distcp") else rest)

    monkeypatch.setattr(LocalSink, "_write", lossy)
    with pytest.raises(ItemError, match=r"does not open as what was meant: \['__1_0.distcp'\]"):
        reshard_alone(source, tmp_path / "lost", world_size=3)
    assert not (tmp_path / "lost").exists()


def test_r58_output_with_a_hole_is_not_published(tmp_path, monkeypatch):
    source = save(tmp_path / "c", *four())

    def shrink(metadata):
        metadata.state_dict_metadata["w"].chunks[1].sizes = torch.Size([2, 2])

    def spoiled(place, files, selection, part):
        damage.edit_metadata(Path(place.written), shrink)
        require_same(place, [file for file in files if file.name != ".metadata"], selection, part)

    monkeypatch.setattr(member, "require_same", spoiled)
    with pytest.raises(ItemError, match=r"no chunk holds 4 of its 24 elements .*; this is a bug"):
        reshard_alone(source, tmp_path / "out", world_size=3)
    assert not (tmp_path / "out").exists()


def test_r58_check_reads_the_output_again(tmp_path, monkeypatch):
    source = save(tmp_path / "c", {"w": torch.zeros(4096)})
    real = LocalSink.write

    def flipping(self, data):
        return real(self, b"\1" + bytes(data)[1:] if len(data) > 8000 else data)

    monkeypatch.setattr(LocalSink, "write", flipping)
    with pytest.raises(ItemError, match=r"the output differs from the source in 1 entries, the first 'w'"):
        reshard_alone(source, tmp_path / "out", world_size=2, check=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["w_threads3", "w_file_per_item", "mesh2d_fsdp_tp", "pp_disjoint"])
def test_r63_fewer_files_without_new_boxes(tmp_path, name):
    source = dcptool.open(FOREIGN / name)
    for options in ({"files": 2}, {"files": 1}):
        done = reshard_alone(FOREIGN / name, tmp_path / str(options["files"]), **options)
        written = dcptool.open(tmp_path / str(options["files"]))
        assert len(written.usage) == done.world_size == options["files"]
        for fqn in source.tensors:
            kept = {(chunk.offsets, chunk.sizes) for chunk in source[fqn].chunks if 0 not in chunk.sizes}
            assert {(chunk.offsets, chunk.sizes) for chunk in written[fqn].chunks if 0 not in chunk.sizes} == kept
        assert dcptool.compare(source, written).equal
    reshard_alone(FOREIGN / name, tmp_path / "one", world_size=1)
    assert dcptool.compare(source, tmp_path / "one").equal


def test_r63_one_rank_has_whole_tensors(tmp_path):
    reshard_alone(FOREIGN / "xver_t2130", tmp_path / "one", world_size=1)
    assert all(len(entry.chunks) == 1 for entry in dcptool.open(tmp_path / "one").tensors.values())
