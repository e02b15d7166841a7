"""The page of `dcptool report` in a real Chromium, opened from a file: mouse, keyboard, filter, colours, names."""

from __future__ import annotations

import json
import re
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest

import dcptool
from tests.ops.report.test_report import HOSTILE, hostile_checkpoint, page_of, regular

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and chromedriver: apt-get install chromium chromium-driver"
)
SWITCHES = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1400,1000"
).split()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """A headless Chromium with a profile of its own."""
    selenium = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in [*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = selenium.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


class Page:
    """A report as a user sees it."""

    def __init__(self, driver, path):
        self.driver = driver
        driver.get_log("browser")
        driver.get_log("performance")
        driver.get(path.as_uri())

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def one(self, selector):
        return self.driver.find_element("css selector", selector)

    def filter(self, text):
        """Type into the filter, instead of what is in it."""
        self.one("#filter").clear()
        self.one("#filter").send_keys(text)

    def open_tensor(self, fqn):
        """Open the shards of one tensor."""
        self.filter(fqn)
        [row] = [row for row in self.all("#tensor-list .row") if row.find_element("css selector", ".name").text == fqn]
        row.click()

    def scheme(self, name):
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def colour(self, selector, which="background-color"):
        return self.one(selector).value_of_css_property(which)

    def detail(self):
        """What the live line says, by its labels."""
        lines = [cell.text.split("\n") for cell in self.all(".detail > span") if "\n" in cell.text]
        return {label.strip(): text for label, text in lines}

    def wait(self, condition):
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def require_quiet(self):
        """No error on the console, and nothing asked for but the page itself."""
        assert self.driver.get_log("browser") == []
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        ours = self.driver.current_url
        assert [request["request"]["url"] for request in sent if request["documentURL"] == ours] == [ours]


def opened(chromium, path, folder, **options):
    dcptool.write_report(path, folder / "report.html", **options)
    return Page(chromium, folder / "report.html")


def expected(chunk):
    """What the live line must say of a chunk."""
    begin, end = chunk.item.byte_offset, chunk.item.byte_offset + chunk.item.nbytes
    return {
        "offsets": str(list(chunk.offsets)),
        "sizes": str(list(chunk.sizes)),
        "file": f"{chunk.item.file}, rank {re.match('__([0-9]+)_', chunk.item.file)[1]}",
        "byte range": f"{begin:,}–{end:,}",
    }


def told(page):
    found = page.detail()
    found["byte range"] = found["byte range"].rpartition(", ")[0]  # without its length
    del found["chunk"]
    return found


def test_a_shard_tells_its_place(chromium, foreign, tmp_path):
    from selenium.webdriver import ActionChains, Keys

    page = opened(chromium, foreign / "mesh2d_fsdp_tp", tmp_path)
    entry = dcptool.open(foreign / "mesh2d_fsdp_tp").tensors["model.w2.weight"]
    assert [tile.text.split("\n")[0] for tile in page.all("#totals li")] == ["24", "66", "12", "5", "4"]
    assert "complete" in page.one("#state").text
    page.open_tensor("model.w2.weight")
    boxes = page.all(".shard")
    assert len(boxes) == len(entry.chunks) == 4
    for box, chunk in zip(boxes, entry.chunks, strict=True):
        ActionChains(chromium).move_to_element(box).perform()
        page.wait(lambda chunk=chunk: str(list(chunk.offsets)) in page.one(".detail").text)
        assert told(page) == expected(chunk)
        assert box.accessible_name.startswith(f"rank {expected(chunk)['file'].rpartition(' ')[2]}, chunk")
    assert page.one(".detail").get_attribute("aria-live") == "polite"
    page.one("#tensor-list .row").send_keys(Keys.TAB)
    seen = []
    for key in (None, Keys.ARROW_RIGHT, Keys.ARROW_DOWN, Keys.ARROW_LEFT, Keys.ARROW_UP, Keys.END, Keys.HOME):
        if key:
            chromium.switch_to.active_element.send_keys(key)
        seen.append(boxes.index(chromium.switch_to.active_element))
        assert told(page) == expected(entry.chunks[seen[-1]])
    corners = [entry.chunks[index].offsets for index in seen]
    assert corners == [(0, 0), (0, 5), (3, 5), (3, 0), (0, 0), corners[-2], corners[-1]]
    assert [box.get_attribute("tabindex") for box in boxes].count("0") == 1
    page.require_quiet()


def test_boxes_are_where_the_shards_are(chromium, foreign, tmp_path):
    page = opened(chromium, foreign / "mesh2d_fsdp_tp", tmp_path)
    entry = dcptool.open(foreign / "mesh2d_fsdp_tp").tensors["model.w2.weight"]
    page.open_tensor("model.w2.weight")
    area = page.one(".map").rect
    for box, chunk in zip(page.all(".shard"), entry.chunks, strict=True):
        for low, side, dim in (("y", "height", 0), ("x", "width", 1)):
            share = (box.rect[low] - area[low]) / area[side]
            assert share == pytest.approx(chunk.offsets[dim] / entry.shape[dim], abs=0.02)
            assert box.rect[side] / area[side] == pytest.approx(chunk.sizes[dim] / entry.shape[dim], abs=0.02)


def test_filter_pages_and_schemes(chromium, foreign, tmp_path):
    page = opened(chromium, foreign / "mesh2d_fsdp_tp", tmp_path)
    page.filter("NORM.weight")
    assert {row.text for row in page.all("#tensor-list .name")} == {
        fqn for fqn in dcptool.open(foreign / "mesh2d_fsdp_tp").tensors if "norm.weight" in fqn
    }
    page.filter("*.weight")
    assert [row.text for row in page.all("#tensor-list .name")] == [
        fqn for fqn in dcptool.open(foreign / "mesh2d_fsdp_tp").tensors if fqn.endswith(".weight")
    ]
    page.filter("nothing has this name")
    assert page.one("#matches").text == "0 of 24 tensors"
    assert not page.all("#tensor-list .row")
    page.open_tensor("model.norm.weight")
    looks = []
    for name in ("light", "dark"):
        page.scheme(name)
        looks.append([page.colour("body"), page.colour("body", "color"), page.colour(".shard")])
        assert contrast(page.colour("body"), page.colour("body", "color")) > 7
        assert contrast(page.colour("body"), page.colour(".quiet", "color")) > 4.5
    assert all(light != dark for light, dark in zip(*looks, strict=True))
    page.require_quiet()


def contrast(first, second):
    """Contrast of two opaque colours, 1 to 21.

    Source: WCAG 2.2, relative luminance and contrast ratio.
    """

    def luminance(text):
        channels = [int(number) / 255 for number in re.findall(r"\d+", text)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    bright, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("width", [360, 1400])
def test_nothing_is_wider_than_the_screen(chromium, foreign, tmp_path, width):
    page = opened(chromium, foreign / "xver_t2130", tmp_path, level=dcptool.Level.DEEP)
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.open_tensor("model.norm.bias")
        assert chromium.execute_script("return document.documentElement.scrollWidth") <= width
        assert "1 empty chunk: [9] of rank 3" in page.one("#tensor-list").text
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_names_are_text(chromium, tmp_path):
    page = opened(chromium, hostile_checkpoint(tmp_path), tmp_path)
    assert chromium.title == "<b>step_1<b> – dcptool report"
    assert page.one("h1").text == "<b>step_1<b>"
    names = [element.get_attribute("textContent") for element in page.all("#tensor-list .name")]
    assert len(names) == len(HOSTILE)
    assert {name for name in HOSTILE if name.isprintable() and name == name.strip() and name} <= set(names)
    assert "a\\x0a.b\\x0d\\u2028\\u2029c" in names
    assert "\\u202egnp.exe\\u2066" in names
    assert '"  spaces  "' in [element.text for element in page.all("#tensor-list .name")]  # spaces are not folded
    assert not page.all("img")
    for row in page.all("#tensor-list .row"):
        chromium.execute_script("arguments[0].click()", row)
    assert len(page.all(".shard")) == len(HOSTILE)
    assert chromium.title == "<b>step_1<b> – dcptool report"
    page.require_quiet()


def test_damage_is_shown_where_it_is(chromium, foreign, tmp_path):
    shutil.copytree(foreign / "xver_t2130", tmp_path / "ckpt")
    (tmp_path / "ckpt" / "__1_0.distcp").unlink()
    page = opened(chromium, tmp_path / "ckpt", tmp_path)
    assert "incomplete" in page.one("#state").text
    assert "__1_0.distcp (rank 1) is missing" in page.one("#findings").text
    assert "Copy the files of all nodes here" in page.one("#findings").text
    page.open_tensor("model.emb.weight")
    bad = page.all(".shard.bad")
    assert [box.text for box in bad] == ["✕ 1"]
    bad[0].click()
    assert "the file is missing" in page.one(".detail").text
    page.require_quiet()


def test_every_kind_of_tensor_opens(chromium, foreign, tmp_path):
    page = opened(chromium, foreign / "dtypes_keys_t2130", tmp_path)
    tensors = dcptool.open(foreign / "dtypes_keys_t2130").tensors
    rows = page.all("#tensor-list .row")
    assert len(rows) == len(tensors)
    for row in rows:
        chromium.execute_script("arguments[0].click()", row)
    panels = page.all("#tensor-list .panel")
    for panel, entry in zip(panels, tensors.values(), strict=True):
        full = [chunk for chunk in entry.chunks if all(chunk.sizes)]
        assert len(panel.find_elements("css selector", ".shard")) == len(full), entry.fqn
    page.require_quiet()


def test_packed_columns_and_dimensions_that_are_not_drawn(chromium, tmp_path):
    """The page reads what no rule describes, and lets choose where more than two dimensions are cut."""
    from dcptool.checkpoint.checkpoint import Checkpoint
    from dcptool.checkpoint.chunks import ChunkTable
    from dcptool.checkpoint.entries import TensorEntry
    from dcptool.checkpoint.extents import Extent
    from dcptool.formats.dcp.format import DCP

    random = np.random.default_rng(3)
    table = ChunkTable()
    places = {}
    for index in range(64):
        offsets = (index // 16, index // 4 % 4, index % 4)
        places[offsets] = Extent("__0_0.distcp", int(random.integers(2**40)), int(random.integers(1, 2**33)))
        table.add(offsets, (1, 1, 1), places[offsets])
    entries = {"w": TensorEntry("w", "float32", (4, 4, 4), None, table.chunks_since((0, 0), 3))}
    files = {"__0_0.distcp": 2**50}
    html = page_of(
        Checkpoint(
            "/run",
            "",
            DCP,
            "torch DCP",
            (),
            entries,
            files,
            table,
            None,
            SimpleNamespace(unsafe={}, stored=lambda *_: None),
        )
    )
    (tmp_path / "r.html").write_text(html)
    page = Page(chromium, tmp_path / "r.html")
    page.one("#tensor-list .row").click()
    assert len(page.all(".shard")) == 16
    from selenium.webdriver.support.select import Select

    Select(page.one(".slices select")).select_by_index(2)
    boxes = page.all(".shard")
    assert len(boxes) == 16
    for box, (first, second) in zip(boxes, [(a, b) for a in range(4) for b in range(4)], strict=True):
        chromium.execute_script("arguments[0].focus()", box)
        item = places[first, second, 2]
        begin, end = item.byte_offset, item.byte_offset + item.nbytes
        assert page.detail()["byte range"].startswith(f"{begin:,}–{end:,}, ")
    page.require_quiet()


def test_ten_thousand_tensors_open_in_two_seconds(chromium, tmp_path):
    (tmp_path / "r.html").write_text(page_of(regular(10_000, 2)))
    page = Page(chromium, tmp_path / "r.html")
    assert int(chromium.execute_script("return document.documentElement.dataset.ready")) < 2000
    assert page.one("#matches").text == "10,000 of 10,000 tensors"
    assert len(page.all("#tensor-list .row")) == 100
    page.all("#tensor-pages button")[1].click()
    assert page.one("#tensor-list .name").text == "model.layers.12.block4.weight"
    page.open_tensor("model.layers.1249.block7.weight")
    assert len(page.all(".shard")) == 2
    page.require_quiet()


def test_a_thousand_shards_are_cells(chromium, tmp_path):
    checkpoint = regular(3, 1000, jitter=4000)
    (tmp_path / "r.html").write_text(page_of(checkpoint))
    page = Page(chromium, tmp_path / "r.html")
    page.open_tensor("model.layers.0.block1.weight")
    boxes = page.all(".map.cells .shard")
    assert len(boxes) == 1000
    chromium.execute_script("arguments[0].focus()", boxes[777])
    assert told(page) == expected(checkpoint.tensors["model.layers.0.block1.weight"].chunks[777])
    page.require_quiet()
