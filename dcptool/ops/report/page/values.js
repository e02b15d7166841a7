// The document: its numbers, its text, and the elements they are put into. The scripts of this folder are joined in the
// order that render/report.py says, inside one function.

const data = JSON.parse(document.getElementById("data").textContent);
const [FQN, DTYPE, SHAPE, NBYTES, LAYOUT, COUNT, BOXES, FILE, OFFSET, LENGTH, TRANSFORM] = Array(11).keys();
const ROWS = 100,
  FILE_ROWS = 16,
  CHUNK_ROWS = 100,
  SHARDS = 1000,
  BRANCHES = 12,
  MIN_SIDE = 14,
  LEGEND = 16;

// Text.

/** Text from the checkpoint with everything that is no visible character escaped, as the terminal shows it. */
function shown(text) {
  if (text === "" || text !== text.trim()) text = JSON.stringify(text);
  return text.replace(/[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu, (char) => {
    const code = char.codePointAt(0);
    const hex = code.toString(16);
    return code < 256
      ? "\\x" + hex.padStart(2, "0")
      : code < 65536
        ? "\\u" + hex.padStart(4, "0")
        : "\\U" + hex.padStart(8, "0");
  });
}
const lines = (text) => text.split("\n").map(shown).join("\n");
const count = (number) => number.toLocaleString("en-US");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
function size(nbytes) {
  if (nbytes < 1000) return `${nbytes} B`;
  const units = ["kB", "MB", "GB", "TB", "PB", "EB"];
  let power = 0,
    value = nbytes;
  while (value >= 999.5 && power < units.length) {
    value /= 1000;
    power++;
  }
  return `${Number(value.toPrecision(3))} ${units[power - 1]}`;
}
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}%` : "0%");
const list = (values) => `[${Array.from(values).join(", ")}]`;
const shapeOf = (shape) => (shape.length ? shape.join(" × ") : "scalar");
const volume = (sizes) => sizes.reduce((a, b) => a * b, 1);

// Elements; text is always set as text.

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") element.addEventListener("click", value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}
const byId = (id) => document.getElementById(id);
const named = (text, extra = "") => make("span", { class: `name mono ${extra}` }, shown(text));
function bar(share, extra = "") {
  const element = make("span", { class: `bar ${extra}` });
  element.style.width = `${Math.min(100, 100 * share)}%`;
  return element;
}

/** Buttons that lead through pages of `total` things, `step` at a time; `draw` is told the first one. */
function pager(nav, total, step, what, draw, first = 0) {
  nav.replaceChildren();
  if (total > step) {
    const move = (to, focus) => {
      pager(nav, total, step, what, draw, to);
      const [back, next] = nav.querySelectorAll("button");
      (focus === 0 ? (back.disabled ? next : back) : next.disabled ? back : next).focus({ preventScroll: true });
    };
    nav.append(
      make(
        "button",
        { class: "plain", type: "button", disabled: first === 0, onclick: () => move(first - step, 0) },
        "Previous",
      ),
      make(
        "span",
        { class: "quiet num" },
        `${count(first + 1)}–${count(Math.min(total, first + step))} of ${count(total)} ${what}`,
      ),
      make(
        "button",
        { class: "plain", type: "button", disabled: first + step >= total, onclick: () => move(first + step, 1) },
        "Next",
      ),
    );
  }
  draw(first);
}

function table(headers, rows, label) {
  const head = make("tr", {}, ...headers.map(([text, kind]) => make("th", { scope: "col", class: kind }, text)));
  const body = rows.map((cells) =>
    make(
      "tr",
      {},
      ...cells.map((cell, i) =>
        cell instanceof Element && cell.tagName === "TD" ? cell : make("td", { class: headers[i][1] }, cell),
      ),
    ),
  );
  const inner = make(
    "table",
    {},
    make("caption", { class: "hidden" }, label),
    make("thead", {}, head),
    make("tbody", {}, ...body),
  );
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, inner);
}

// Rules → numbers.

const columns = new Map();

/** Values of a column: triples (count, first, step), or zigzag LEB128 differences in base64. */
function column(index) {
  if (columns.has(index)) return columns.get(index);
  const rule = data.columns[index];
  const values = [];
  if (typeof rule === "string") {
    const bytes = atob(rule);
    for (let at = 0, before = 0; at < bytes.length;) {
      let number = 0,
        scale = 1,
        byte;
      do {
        byte = bytes.charCodeAt(at++);
        number += (byte % 128) * scale;
        scale *= 128;
      } while (byte > 127);
      before += number % 2 ? -(number + 1) / 2 : number / 2;
      values.push(before);
    }
  } else {
    for (let at = 0; at < rule.length; at += 3) {
      for (let i = 0; i < rule[at]; i++) values.push(rule[at + 1] + i * rule[at + 2]);
    }
  }
  columns.set(index, values);
  return values;
}

/** Return index of a chunk → [offsets, sizes]. */
function boxReader(tensor) {
  const rule = data.boxes[tensor[BOXES]];
  if (!rule.cuts) {
    const starts = rule.starts.map(column),
      sizes = rule.sizes.map(column);
    return (i) => [starts.map((values) => values[i]), sizes.map((values) => values[i])];
  }
  const cuts = rule.cuts.map(column);
  const order = rule.order === undefined ? null : column(rule.order);
  return (i) => {
    let cell = order ? order[i] : i;
    const offsets = Array(cuts.length),
      sizes = Array(cuts.length);
    for (let dim = cuts.length - 1; dim >= 0; dim--) {
      const n = cuts[dim].length - 1,
        k = cell % n;
      cell = (cell - k) / n;
      offsets[dim] = cuts[dim][k];
      sizes[dim] = cuts[dim][k + 1] - cuts[dim][k];
    }
    return [offsets, sizes];
  };
}

/** Return index of a chunk → everything known about it. */
function chunkReader(index) {
  const tensor = data.tensors[index];
  const box = boxReader(tensor);
  const [files, byteOffsets, lengths, transforms] = [FILE, OFFSET, LENGTH, TRANSFORM].map((field) =>
    column(tensor[field]),
  );
  const bad = marks.get(index) ?? new Map();
  return (i) => {
    const [offsets, sizes] = box(i);
    const problems = [...(bad.get(offsets.join()) ?? [])];
    const file = data.files[files[i]];
    if (!file) problems.push("the metadata names no place for it");
    else if (file[1] === null) problems.push("the file is missing");
    else if (byteOffsets[i] + lengths[i] > file[1]) problems.push("it lies beyond the end of the file");
    return {
      i,
      offsets,
      sizes,
      file: files[i],
      byteOffset: byteOffsets[i],
      nbytes: lengths[i],
      transforms: data.transforms[transforms[i]],
      problems,
    };
  };
}

/** Tensor → offsets of a box → what is wrong there. */
const marks = new Map();
for (const group of data.findings) {
  if (group.severity === "note") continue;
  for (const [, tensor, offsets] of group.messages) {
    if (tensor === null) continue;
    if (!marks.has(tensor)) marks.set(tensor, new Map());
    const key = offsets ? offsets.join() : "";
    marks.get(tensor).set(key, [...(marks.get(tensor).get(key) ?? []), `${group.severity}: ${group.kind}`]);
  }
}

const ownerOf = (file) =>
  file < 0 ? "no file" : data.files[file][2] === null ? shown(data.files[file][0]) : `rank ${data.files[file][2]}`;
const shortOwner = (file) => (file < 0 ? "–" : String(data.files[file][2] ?? file));
const hueOf = (file) => (250 + 137.508 * (data.files[file]?.[2] ?? file)) % 360;
function placeOf(chunk) {
  if (chunk.file < 0) return "nowhere";
  return `bytes ${count(chunk.byteOffset)}–${count(chunk.byteOffset + chunk.nbytes)}`;
}
