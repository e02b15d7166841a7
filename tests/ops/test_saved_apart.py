"""Saves with `use_collectives=False` in which ranks hold values of their own: none is dropped without a word."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import dcptool  # noqa: E402
from dcptool.checks.check import Level, check  # noqa: E402
from dcptool.checks.copies import saved_apart  # noqa: E402
from dcptool.ops.convert.convert import ConvertOptions  # noqa: E402
from dcptool.ops.reshard.plan import ReshardOptions  # noqa: E402
from tests.alone import reshard_alone  # noqa: E402
from tests.conftest import FOREIGN  # noqa: E402
from tests.ranks import Shard, save_apart  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
WHOLE = torch.arange(20.0).view(5, 4)


def state(rank):
    return {
        "w": Shard.of(WHOLE, rank, 2), "same": torch.ones(3), "rng": torch.tensor([rank, 7]),
        "loader": {"at": 100 * rank, "epoch": 3}, "boxes": torch.ones(1, 2),
    }  # fmt: skip


@pytest.fixture
def source(tmp_path):
    return save_apart(tmp_path / "ck", state(0), state(1))


def said(notes):
    return [str(note) for note in notes if "each rank saved its own" in str(note)]


def test_what_differs_is_told_by_checksums(source):
    assert set(saved_apart(dcptool.open(source))) == {"rng", "loader.at"}
    assert saved_apart(dcptool.open(save_apart(source.parent / "alone", state(0)))) == []


def test_verify_compares_objects_too(source):
    found = [
        finding for finding in check(dcptool.open(source), Level.DEEP).findings if finding.kind == "replicas-differ"
    ]
    assert {finding.fqn for finding in found} == {"rng", "loader.at"}


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_r29_what_differs_is_refused_and_named(source, tmp_path, to):
    for dry_run in (True, False):
        with pytest.raises(dcptool.errors.UnsupportedError, match="they differ: 'rng'") as error:
            dcptool.convert(source, tmp_path / f"out.{to}", to, dry_run=dry_run)
        assert "'loader.at'" in error.value.message
        assert "--rank 0" in error.value.next_step
    assert not (tmp_path / f"out.{to}").exists()
    assert said(dcptool.convert(source, tmp_path / "w", to, ConvertOptions(keys=("w", "same"))).notes) == []
    assert said(dcptool.convert(source, tmp_path / "x", to, ConvertOptions(exclude=("rng", "loader.*"))).notes) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_the_values_of_one_rank_can_be_taken(source, tmp_path, rank):
    (source / "config.json").write_text("{}")
    done = dcptool.convert(source, tmp_path / "out.pt", "torch", ConvertOptions(rank=rank))
    loaded = torch.load(tmp_path / "out.pt")
    assert (loaded["rng"].tolist(), loaded["loader"]["at"]) == ([rank, 7], 100 * rank)
    assert torch.equal(loaded["w"], WHOLE)
    [note] = said(done.notes)
    assert f"rank {rank} where it has them" in note
    dcptool.convert(source / f"__{rank}.metadata", tmp_path / "same.pt", "torch")
    assert dcptool.compare(tmp_path / "out.pt", tmp_path / "same.pt").equal
    reshard_alone(source, tmp_path / "out", world_size=3, rank=rank)
    assert dcptool.compare(tmp_path / "out.pt", tmp_path / "out").equal
    assert (tmp_path / "out" / "config.json").exists()


def test_a_rank_that_saved_no_metadata_is_none(source, tmp_path):
    for path, options in ((source, {"rank": 2}), (FOREIGN / "w_async", {"rank": 0})):
        with pytest.raises(dcptool.errors.LayoutError, match="has no __"):
            dcptool.convert(path, tmp_path / "out.pt", "torch", ConvertOptions(**options))
        with pytest.raises(dcptool.errors.LayoutError, match="has no __"):
            reshard_alone(path, tmp_path / "out", world_size=2, **options)


def test_diff_names_them(source, tmp_path):
    dcptool.convert(source, tmp_path / "out.pt", "torch", ConvertOptions(rank=0))
    report = dcptool.compare(source, tmp_path / "out.pt")
    assert len(said(finding.message for finding in report.notes)) == 1
    assert dcptool.compare(source / "__1.metadata", source).equal is False


def test_ranks_that_disagree_on_shapes_are_refused_until_one_is_named(tmp_path):
    source = save_apart(
        tmp_path / "ck", *({"a": torch.ones(2 + rank), "b": [torch.ones(1), (1,)][rank]} for rank in range(2))
    )
    with pytest.raises(
        dcptool.errors.ItemError, match=r"(?s)'a' is of different.*'b' is a tensor in some.*__0\.metadata"
    ):
        dcptool.convert(source, tmp_path / "out.pt", "torch")
    for rank in range(2):
        dcptool.convert(source / f"__{rank}.metadata", tmp_path / f"{rank}.pt", "torch")
        loaded = torch.load(tmp_path / f"{rank}.pt")
        assert (len(loaded["a"]), loaded["b"]) == (2 + rank, [torch.ones(1), (1,)][rank])


def test_reshard_refuses_them_and_takes_those_of_one(source, tmp_path):
    with pytest.raises(dcptool.errors.UnsupportedError, match="they differ"):
        dcptool.reshard(source, tmp_path / "out", ReshardOptions(world_size=2, workers=1))
    result = dcptool.reshard(source, tmp_path / "out", ReshardOptions(world_size=2, workers=2, rank=1))
    assert len(said(result.notes)) == 1
