"""Names and globs that match nothing: each command says so, and what they may have meant."""

from __future__ import annotations

import json
import time

import pytest

from dcptool.checkpoint.selection import unmatched
from tests.conftest import FOREIGN, run

CKPT = FOREIGN / "xver_t2130"
GIVEN = ("--keys", "model*", "--keys", "modle*", "--exclude", "*.wieght")
TOLD = (
    "--keys 'modle*' matches nothing; did you mean 'model*'?",
    "--exclude '*.wieght' matches nothing; did you mean '*.weight'?",
)


def commands(tmp_path):
    return {
        "inspect": ("inspect", CKPT),
        "convert": ("convert", CKPT, tmp_path / "model.pt", "--to", "torch"),
        "reshard": ("reshard", CKPT, tmp_path / "resharded", "--world-size", 2, "--dry-run"),
        "diff": ("diff", CKPT, CKPT),
        "report": ("report", CKPT, "-o", tmp_path / "page.html"),
    }


@pytest.mark.parametrize("name", ["inspect", "convert", "reshard", "diff", "report"])
def test_a_glob_that_matches_nothing_is_told(name, tmp_path):
    done = run(*commands(tmp_path)[name], *GIVEN)
    assert done.returncode == 0
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if "matches nothing" in line] == [f"note: {told}" for told in TOLD]


@pytest.mark.parametrize("name", ["inspect", "convert", "reshard", "diff", "report"])
def test_json_tells_it_too(name, tmp_path):
    answer = json.loads(run(*commands(tmp_path)[name], *GIVEN, "--json").stdout)
    notes = (answer["checkpoints"][0] if name == "inspect" else answer)["notes"]
    kinds = [note["kind"] for note in notes if isinstance(note, dict)]
    assert kinds.count("unmatched-glob") == (2 if name in ("inspect", "diff") else 0)
    assert set(TOLD) <= {note["message"] if isinstance(note, dict) else note for note in notes}


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.emb.weigth", "; did you mean 'model.emb.weight'?"),
        ("model.embb.*", "; did you mean 'model.emb.*'?"),
        ("modle", "; did you mean 'model.*'?"),
        ("*.wieght", "; did you mean '*.weight'?"),
        ("model.e*.wieght", "; did you mean 'model.e*.weight'?"),
        ("model.emb", "; for those that begin so: --keys 'model.emb*'"),
        ("optim*,model.ema", "; --keys is repeated, not comma-separated: --keys 'optim*' --keys 'model.ema'"),
        ("optim*,modle.ema", ""),
        ("zzz*", ""),
        ("", "; for those that begin so: --keys '*'"),
        ("[", ""),
    ],
)
def test_what_may_have_been_meant(key, meant):
    names = {"model.emb.weight", "model.emb.bias", "model.ema", "optim.state.model.emb.exp_avg"}
    assert unmatched(names, [key], ()) == (f"--keys {key!r} matches nothing{meant}",)


def test_a_comma_in_a_name_is_no_separator():
    assert unmatched({"a,b", "a", "b"}, ["a,b"], ()) == ()
    assert "comma" not in unmatched({"c,d", "a", "b"}, ["a,b"], ())[0]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("model.emb.weigth", "did you mean 'model.emb.weight'?"),
        ("model.embb.*", "did you mean 'model.emb.*'?"),
        ("model.ema,model.norm.*", "--keys is repeated, not comma-separated"),
    ],
)
def test_where_nothing_is_selected_the_message_says_what_may_have_been_meant(key, meant):
    done = run("inspect", CKPT, "--keys", key)
    assert done.returncode > 1
    assert f"no entry matches {key!r}; {meant}" in done.stderr
    assert "Names begin with 'optim'" in done.stderr


def test_many_names_and_many_globs_cost_a_look_each():
    names = {f"model.layers.{n}.self_attn.q_proj.weight": None for n in range(10_000)}
    began = time.perf_counter()
    notes = unmatched(names, [*names, *(f"modle.{n}.*" for n in range(20))], ["*"])
    assert len(notes) == 13
    assert notes[-1] == "8 more --keys match nothing"
    assert time.perf_counter() - began < 2
