"""`dcptool report` without a browser: what the document says is what the checkpoint holds, and the page is safe."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shutil
from array import array
from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.numpy import save_file

import dcptool
from dcptool.checkpoint.checkpoint import Checkpoint
from dcptool.checkpoint.chunks import ChunkTable
from dcptool.checkpoint.entries import TensorEntry
from dcptool.checkpoint.extents import Extent
from dcptool.errors import DcptoolError, LayoutError, OutputExistsError, SeveralCheckpointsError, UnsupportedError
from dcptool.formats.dcp.format import DCP
from dcptool.ops.inspect.summary import summarize_checkpoint
from dcptool.ops.report.columns import ColumnTable, boxes_rule, column_rule
from dcptool.ops.report.document import describe
from dcptool.ops.report.html import embedded, to_html
from dcptool.ops.verify.verify import verify
from tests.conftest import FOREIGN, PARTS, run
from tests.damage import flip_byte

HOSTILE = (
    "</script><script>document.title = 'broken'</script>",
    "<!--<script>",
    "a\n.b\r\u2028\u2029c",
    "\u202egnp.exe\u2066",
    '"><img src=x onerror="document.title=\'broken\'">',
    "{{data}}&amp;{{script}}",
    "\x1b[31mred\x00",
    "  spaces  ",
    "",
    "__proto__.constructor",
)


def page_data(page):
    """The document in a page."""
    [text] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def decode_column(rule):
    """Values of a column, as `dcptool.ops.report.columns` says they are stored."""
    if isinstance(rule, list):
        triples = zip(rule[::3], rule[1::3], rule[2::3], strict=True)
        return [first + step * i for count, first, step in triples for i in range(count)]
    values, value, number, shift = [], 0, 0, 0
    for byte in base64.b64decode(rule):
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            value += -(number + 1) // 2 if number % 2 else number // 2
            values.append(value)
            number = shift = 0
    return values


def decode_boxes(rule, columns, count):
    """(offsets, sizes) of each box."""
    if "cuts" not in rule:
        starts, sizes = ([decode_column(columns[i]) for i in rule[key]] for key in ("starts", "sizes"))
        return [(tuple(c[i] for c in starts), tuple(c[i] for c in sizes)) for i in range(count)]
    cuts = [decode_column(columns[i]) for i in rule["cuts"]]
    cells = list(product(*([(a, b - a) for a, b in pairwise(cut)] for cut in cuts)))
    order = decode_column(columns[rule["order"]]) if "order" in rule else range(count)
    return [(tuple(a for a, _ in cells[i]), tuple(n for _, n in cells[i])) for i in order]


def decode(document):
    """Fqn → chunks as (offsets, sizes, extent); the extent is None where there is no place."""
    columns, names = document["columns"], [file[0] for file in document["files"]]
    tensors = {}
    for fqn, _, _, _, _, count, boxes, *places in document["tensors"]:
        found = decode_boxes(document["boxes"][boxes], columns, count)
        rows = list(zip(*(decode_column(columns[i]) for i in places), strict=True))
        assert len(found) == len(rows) == count
        tensors[fqn] = [
            (*box, Extent(names[f], offset, nbytes, tuple(document["transforms"][t])) if f >= 0 else None)
            for box, (f, offset, nbytes, t) in zip(found, rows, strict=True)
        ]
    return tensors


def describe_path(path):
    checkpoint = dcptool.open(path)
    summary = summarize_checkpoint(checkpoint, (), (), chunks=False, depth=1)
    return checkpoint, describe(checkpoint, summary, verify(path).verdicts[0], "today")


@pytest.mark.torchfree
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_the_document_says_every_box_and_place(part):
    try:
        checkpoint, document = describe_path(part.path)
    except DcptoolError:
        assert part.damaged
        return
    document = json.loads(embedded(document))
    assert decode(document) == {
        fqn: [tuple(chunk) for chunk in entry.chunks] for fqn, entry in checkpoint.tensors.items()
    }
    for row, entry in zip(document["tensors"], checkpoint.tensors.values(), strict=True):
        assert (row[0], document["dtypes"][row[1]], tuple(row[2]), row[3]) == (*entry[:3], entry.nbytes)
    names = [file[0] for file in document["files"]]
    copies = {document["tensors"][i][0]: chunks for i, chunks in document["replicas"]}
    assert copies == {
        fqn: [
            [list(c.offsets), list(c.sizes), names.index(c.item.file), c.item.byte_offset, c.item.nbytes]
            for c in entry.replicas
        ]
        for fqn, entry in checkpoint.tensors.items()
        if entry.replicas
    }
    for row, entry in zip(document["objects"], checkpoint.objects.values(), strict=True):
        place = Extent(names[row[4]], row[5], row[6]) if row[4] >= 0 else None
        assert (row[0], place and place[:3]) == (entry.fqn, entry.item and entry.item[:3])
    nbytes = {file[0]: file[1] for file in document["files"] if file[1] is not None}
    assert nbytes == dict(checkpoint.files)


NUMBERS = st.integers(-(2**62), 2**62 - 1)
STEPPED = st.lists(st.tuples(st.integers(1, 9), NUMBERS, st.integers(-5, 5)), max_size=5).map(
    lambda runs: [max(min(first + step * i, 2**62), -(2**62)) for n, first, step in runs for i in range(n)]
)


@given(st.one_of(st.lists(NUMBERS, max_size=40), STEPPED))
@example([0, 5, 5, 5, 9, 8])
def test_a_column_comes_back(values):
    rule = json.loads(json.dumps(column_rule(array("q", values))))
    assert decode_column(rule) == values


@pytest.mark.torchfree
def test_regular_columns_are_a_few_numbers():
    assert column_rule(range(0, 4_000, 4)) == [1000, 0, 4]
    assert column_rule([7] * 1000) == [1000, 7, 0]
    assert len(column_rule([(i * i) % 9973 for i in range(1000)])) < 4 * 1000  # packed


@st.composite
def cut_tensors(draw):
    """A shape and boxes: a grid, perhaps in another order, with empty boxes, or with one box moved."""
    cuts = [sorted(draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))) for _ in range(draw(st.integers(0, 3)))]
    shape = tuple(cut[-1] for cut in cuts)
    intervals = [[(a, b - a) for a, b in zip([0, *cut], cut, strict=False)] for cut in cuts]
    boxes = [(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in product(*intervals)]
    boxes = draw(st.permutations(boxes)) if draw(st.booleans()) else boxes
    if boxes and shape and draw(st.booleans()):
        offsets, sizes = boxes[0]
        boxes = [((offsets[0] + 1, *offsets[1:]), sizes), *boxes[1:]]
    return shape, boxes


@given(cut_tensors())
def test_boxes_come_back(tensor):
    shape, boxes = tensor
    table = ChunkTable()
    for offsets, sizes in boxes:
        table.add(offsets, sizes, None)
    columns = ColumnTable()
    rule = boxes_rule(shape, table.chunks_since((0, 0), len(shape)), columns)
    assert decode_boxes(rule, columns.rules, len(boxes)) == list(boxes)


@pytest.mark.torchfree
def test_grids_are_rules(foreign):
    _, document = describe_path(foreign / "mesh2d_fsdp_tp")
    assert all("cuts" in rule for rule in document["boxes"])


def regular(n_tensors, n_ranks, jitter=0):
    """A checkpoint of so many tensors, each in one row-wise shard per rank; with jitter no two places are alike."""
    table, entries = ChunkTable(), {}
    ends = [0] * n_ranks
    boxes = [((4 * rank, 0), (4, 1024)) for rank in range(n_ranks)]
    files = [f"__{rank}_0.distcp" for rank in range(n_ranks)]
    seed = 12345
    for index in range(n_tensors):
        mark = table.mark()
        lengths = []
        for _ in range(n_ranks):
            seed = seed * 1103515245 + 12345 & 0x7FFFFFFF
            lengths.append(17_000 + (seed >> 8) % jitter if jitter else 17_000)
        table.extend(boxes, files, ends, lengths)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
        fqn = f"model.layers.{index // 8}.block{index % 8}.weight"
        shape = (4 * n_ranks, 1024)
        entries[fqn] = TensorEntry(fqn, "float32", shape, None, table.chunks_since(mark, 2))
    sizes = dict(zip(files, ends, strict=True))
    return Checkpoint(
        "/run/step_1",
        "",
        DCP,
        "torch DCP",
        (),
        entries,
        sizes,
        table,
        None,
        SimpleNamespace(unsafe={}, stored=lambda *_: None),
    )


def page_of(checkpoint):
    verdict = verify(FOREIGN / "w_async").verdicts[0]
    return to_html(
        describe(checkpoint, summarize_checkpoint(checkpoint, (), (), chunks=False, depth=1), verdict, "today")
    )


@pytest.mark.torchfree
def test_a_report_is_small(foreign, tmp_path):
    assert dcptool.write_report(foreign / "xver_t2130", tmp_path / "r.html").nbytes < 80_000
    template = len(page_of(regular(0, 1)))
    assert len(page_of(regular(100, 100))) < template + 30_000
    assert len(page_of(regular(100, 100, jitter=4000))) < template + 100_000  # 10 bytes for each of 10,000 chunks


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [0, 4000])
def test_a_million_chunks_are_less_than_10_mb(jitter):
    checkpoint = regular(1000, 1000, jitter)
    page = page_of(checkpoint)
    assert len(page) < (10_000_000 if jitter else 400_000)
    chunks = decode(page_data(page))
    for fqn in list(checkpoint)[::333]:
        assert chunks[fqn] == [tuple(chunk) for chunk in checkpoint.tensors[fqn].chunks]


def hostile_checkpoint(folder):
    """A DCP directory whose names try to be markup, script and control characters; its own name too."""
    source = folder / "names.safetensors"
    save_file({name: np.arange(4, dtype=np.float32) for name in HOSTILE}, source)
    target = folder / "<b>step_1<b>"
    dcptool.convert(source, target, "dcp")
    return target


@pytest.mark.torchfree
def test_names_cannot_leave_the_data(tmp_path):
    path = hostile_checkpoint(tmp_path)
    page = dcptool.write_report(path, tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    assert page.n_tensors == len(HOSTILE)
    assert {row[0] for row in page_data(text)["tensors"]} == set(HOSTILE)
    assert text.count("</script>") == text.count("<script") == 2
    [data] = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data.isascii()
    assert not set(data) & set("<>&\n\r\x1b\0")
    assert "<b>" not in text
    assert f"<title>{html.escape('<b>step_1<b>')} " in text


@pytest.mark.torchfree
def test_the_page_loads_nothing_and_allows_its_own_code_only(foreign, tmp_path):
    dcptool.write_report(foreign / "w_async", tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    [policy] = re.findall(r'Content-Security-Policy" content="(.*?)"', text)
    [style], [script] = (
        re.findall(r"<style>(.*?)</style>", text, re.DOTALL),
        re.findall(r"<script>(.*?)</script>", text, re.DOTALL),
    )
    for kind, source in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    assert set(re.findall(r'(?:src|href)="([^"]*)"', text)) == {"#tensors"}
    assert not re.findall(r"https?://|@import|url\(|innerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.findall(r"\{\{\w+\}\}", text)


@pytest.mark.torchfree
def test_findings_are_those_of_verify(foreign, tmp_path):
    shutil.copytree(foreign / "xver_t2130", tmp_path / "ckpt")
    item = dcptool.open(tmp_path / "ckpt").tensors["model.emb.weight"].chunks[1].item
    flip_byte(tmp_path / "ckpt" / item.file, item.byte_offset + item.nbytes // 2)
    (tmp_path / "ckpt" / "__3_0.distcp").unlink()
    done = dcptool.write_report(tmp_path / "ckpt", tmp_path / "r.html", level=dcptool.Level.DEEP)
    found = dcptool.verify(tmp_path / "ckpt", dcptool.VerifyOptions(level=dcptool.Level.DEEP)).verdicts[0].findings
    document = page_data((tmp_path / "r.html").read_text())
    groups = [group for group in document["findings"] if group["severity"] != "note"]
    expected = [finding for finding in found if finding.severity.value != "note"]
    assert {"wrong-crc", "missing-file"} <= {group["kind"] for group in groups}
    assert sum(group["count"] for group in groups) == len(expected) == done.n_errors + done.n_warnings
    assert {m for group in groups for m, _, _ in group["messages"]} == {finding.message for finding in expected}
    assert {step for group in groups for step in group["steps"]} == {f.next_step for f in expected if f.next_step}
    [(_, tensor, offsets)] = next(group["messages"] for group in groups if group["kind"] == "wrong-crc")
    assert (document["tensors"][tensor][0], offsets) == ("model.emb.weight", [10, 0])
    assert (document["state"], done.good) == ("damaged", False)


@pytest.mark.torchfree
def test_many_findings_are_counted(foreign):
    from dcptool.checkpoint.findings import Finding
    from dcptool.checkpoint.kinds import Severity
    from dcptool.ops.report.document import MAX_MESSAGES, grouped

    findings = [Finding("wrong-crc", Severity.ERROR, f"m{i}", fqn="w", next_step="go") for i in range(MAX_MESSAGES + 7)]
    [group] = grouped(findings, {"w": 3})
    assert (group["count"], len(group["messages"]), group["steps"]) == (MAX_MESSAGES + 7, MAX_MESSAGES, ["go"])
    assert group["messages"][0] == ["m0", 3, None]


@pytest.mark.torchfree
def test_output_is_refused_where_it_must_not_go(foreign, tmp_path):
    shutil.copytree(foreign / "w_async", tmp_path / "ckpt")
    for place, error in (
        (tmp_path / "ckpt" / "r.html", UnsupportedError),
        (tmp_path / "ckpt", OutputExistsError),
        (str(tmp_path) + "/", OutputExistsError),
    ):
        with pytest.raises(error):
            dcptool.write_report(tmp_path / "ckpt", place, overwrite=True)
    target = tmp_path / "r.html"
    target.write_text("mine")
    with pytest.raises(OutputExistsError, match="--overwrite"):
        dcptool.write_report(tmp_path / "ckpt", target)
    assert target.read_text() == "mine"
    with pytest.raises(OutputExistsError, match="no HTML page: not replaced"):
        dcptool.write_report(tmp_path / "ckpt", target, overwrite=True)
    target.write_text("<!DOCTYPE html><title>older</title>")
    dcptool.write_report(tmp_path / "ckpt", target, overwrite=True)
    assert target.read_text().startswith("<!doctype html>")
    with pytest.raises(LayoutError, match="no entry matches"):
        dcptool.write_report(tmp_path / "ckpt", target, keys=["nothing"], overwrite=True)
    fqn = next(iter(dcptool.open(tmp_path / "ckpt").tensors))
    one = dcptool.write_report(tmp_path / "ckpt", target, keys=fqn, overwrite=True)
    assert (one.n_tensors, one.n_objects) == (1, 0)  # one name, not its letters
    with pytest.raises(SeveralCheckpointsError):
        dcptool.write_report(foreign / "run_crashed", tmp_path / "other.html")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "r.html"]


@pytest.mark.torchfree
def test_a_shard_of_the_checkpoint_is_not_replaced(foreign, tmp_path):
    shutil.copytree(foreign / "hf_consolidated", tmp_path / "hf")
    file = next((tmp_path / "hf").rglob("*.safetensors"))
    before = file.read_bytes()
    with pytest.raises(UnsupportedError):
        dcptool.write_report(file, file, overwrite=True)
    assert file.read_bytes() == before


@pytest.mark.torchfree
def test_the_one_checkpoint_below_is_judged_itself(foreign, tmp_path):
    done = dcptool.write_report(foreign / "megatron_tp2", tmp_path / "r.html")
    assert done.good
    assert done.checkpoint.endswith("iter_0000010")
    assert "the one checkpoint in" in done.notes[0]


@pytest.mark.torchfree
def test_selection(foreign, tmp_path):
    done = dcptool.write_report(foreign / "xver_t2130", tmp_path / "r.html", keys=["model.*"], exclude=["*.bias"])
    document = page_data((tmp_path / "r.html").read_text())
    names = [row[0] for row in [*document["tensors"], *document["objects"]]]
    assert all(name.startswith("model.") and not name.endswith(".bias") for name in names)
    assert 0 < len(names) == done.n_tensors + done.n_objects < document["n_entries"]


def test_command(foreign, tmp_path):
    target = tmp_path / "r.html"
    done = run("report", foreign / "xver_t2130", "-o", target)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"complete, 19 tensors, 55 chunks, 82 objects; page of [\d.]+ kB, [\d.]+ s: .*r\.html\n", done.stdout
    )
    assert run("report", foreign / "xver_t2130", "-o", target).returncode == 3
    done = run("report", foreign / "xver_t2130", "--output", target, "--overwrite", "--json")
    answer = json.loads(done.stdout)
    assert answer["nbytes"] == target.stat().st_size
    assert (answer["schema"], answer["state"], answer["good"], answer["n_chunks"]) == (1, "complete", True, 55)
    step = next(path for path in (foreign / "run_crashed").rglob("step_200"))
    done = run("report", step, "-o", tmp_path / "bad.html", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
    assert page_data((tmp_path / "bad.html").read_text())["state"] == "incomplete"
    assert run("report", step, "-o", tmp_path / "x.html", "--threads", "2").returncode == 2
    assert run("report", step).returncode == 2


def test_on_an_object_store(foreign, s3_url):
    import fsspec

    done = dcptool.write_report(foreign / "w_async", f"{s3_url}/r.html")
    filesystem = fsspec.filesystem("s3")
    assert filesystem.cat(f"{s3_url}/r.html").startswith(b"<!doctype html>")
    assert filesystem.info(f"{s3_url}/r.html")["size"] == done.nbytes
    with pytest.raises(OutputExistsError):
        dcptool.write_report(foreign / "w_async", f"{s3_url}/r.html")


@pytest.mark.torchfree
@pytest.mark.parametrize(
    ("to", "name"), [("torch", "model.pt"), ("safetensors", "model.safetensors"), ("safetensors", "hf")]
)
def test_other_formats(foreign, tmp_path, to, name):
    dcptool.convert(foreign / "w_async", tmp_path / name, to)
    done = dcptool.write_report(tmp_path / name, tmp_path / "r.html", level=dcptool.Level.DEEP)
    document = page_data((tmp_path / "r.html").read_text())
    checkpoint = dcptool.open(tmp_path / name)
    assert decode(document) == {fqn: [tuple(c) for c in entry.chunks] for fqn, entry in checkpoint.tensors.items()}
    assert (done.good, document["format"]) == (True, checkpoint.format.name)
    assert all(file[1] is not None for file in document["files"])
