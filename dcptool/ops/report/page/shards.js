// The map of one tensor's shards: boxes in place where they are large enough to point at, else a cell for each.

// A map of one tensor's shards.

let maps = 0;

/** What a box says when it is pointed at, or has the focus. */
function tell(place, chunk, n) {
  const cell = (label, text, extra) => make("span", { class: extra ?? "" }, make("b", {}, label + " "), text);
  place.replaceChildren(
    cell("chunk", `${count(chunk.i + 1)} of ${count(n)}`),
    cell("offsets", list(chunk.offsets)),
    cell("sizes", list(chunk.sizes) + (volume(chunk.sizes) ? "" : ", empty")),
    cell(
      "file",
      chunk.file < 0
        ? "none"
        : shown(data.files[chunk.file][0]) +
            (data.files[chunk.file][2] === null ? "" : `, rank ${data.files[chunk.file][2]}`),
      "name",
    ),
    cell(
      "byte range",
      chunk.file < 0
        ? "nowhere"
        : `${count(chunk.byteOffset)}–${count(chunk.byteOffset + chunk.nbytes)}, ${size(chunk.nbytes)}`,
    ),
    ...(chunk.transforms.length ? [cell("stored through", chunk.transforms.map(shown).join(", "))] : []),
    ...(chunk.problems.length ? [make("span", { class: "bad" }, chunk.problems.map(shown).join("; "))] : []),
  );
}

/** Distinct intervals of the boxes along one dimension, in order. */
function intervals(chunks, dim) {
  const found = new Map();
  for (const chunk of chunks)
    found.set(`${chunk.offsets[dim]},${chunk.sizes[dim]}`, [chunk.offsets[dim], chunk.sizes[dim]]);
  return [...found.values()].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
}

/** Element → share of an axis, to scale if every interval is wide enough, else all stretches equally wide; or null. */
function axis(extent, chunks, dim, pixels) {
  if (dim === null) return { at: (x) => x, scaled: true };
  const cuts = [
    ...new Set(chunks.flatMap((chunk) => [chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]])),
  ].sort((a, b) => a - b);
  if (cuts[0] > 0) cuts.unshift(0);
  if (cuts[cuts.length - 1] < extent) cuts.push(extent);
  extent = Math.max(extent, cuts[cuts.length - 1]);
  const least = Math.min(...cuts.slice(1).map((cut, i) => cut - cuts[i]));
  if ((least / extent) * pixels >= MIN_SIDE) return { at: (x) => x / extent, scaled: true };
  if ((cuts.length - 1) * MIN_SIDE > pixels) return null;
  const index = new Map(cuts.map((cut, i) => [cut, i / (cuts.length - 1)]));
  return { at: (x) => index.get(x), scaled: false };
}

function shardMap(index, place) {
  const tensor = data.tensors[index],
    shape = tensor[SHAPE],
    n = tensor[COUNT],
    read = chunkReader(index);
  const id = `map${maps++}`;
  const extra = (data.replicas.find(([owner]) => owner === index) ?? [0, []])[1].length;
  const info = [`${plural(n, "chunk")} in ${plural(new Set(column(tensor[FILE])).size, "file")}`];
  if (extra) info.push(`${plural(extra, "further copy").replace("copys", "copies")}`);
  place.append(make("p", { class: "quiet" }, info.join(" · ")));
  if (!n) {
    place.append(make("p", {}, "The metadata lists no chunks: nothing of it is stored."));
    return;
  }
  const holder = make("div"),
    nav = make("nav", { class: "pages", "aria-label": "Pages of the map" });
  const detail = make("div", { class: "detail", role: "status", "aria-live": "polite", "aria-atomic": "true" });
  const hint = () =>
    detail.replaceChildren(
      make(
        "span",
        { class: "hint" },
        "Point at a shard, or reach the map with Tab and move with the arrow keys, to see where it is stored.",
      ),
    );
  const slices = make("div", { class: "slices" });
  const legend = make("div", { class: "legend" });
  place.append(slices, holder, nav, detail, legend);
  hint();
  const chunks = Array.from({ length: n }, (_, i) => read(i));
  const full = chunks.filter((chunk) => volume(chunk.sizes) > 0);
  const empty = chunks.filter((chunk) => volume(chunk.sizes) === 0);
  const cuts = shape.map((_, dim) => intervals(full, dim));
  const sharded = shape.map((_, dim) => dim).filter((dim) => cuts[dim].length > 1);
  const chosen = new Map(sharded.slice(2).map((dim) => [dim, 0]));
  let drawn = sharded.slice(0, 2);
  for (let dim = shape.length - 1; dim >= 0 && drawn.length < Math.min(2, shape.length); dim--)
    if (!drawn.includes(dim)) drawn.push(dim);
  drawn.sort((a, b) => a - b);
  const [down, across] = drawn.length === 2 ? drawn : [null, drawn[0] ?? null];
  for (const dim of chosen.keys()) {
    const select = make(
      "select",
      {},
      ...cuts[dim].map(([start, length], i) => make("option", { value: i }, `${start} to ${start + length}`)),
    );
    select.addEventListener("change", () => {
      chosen.set(dim, Number(select.value));
      paint();
    });
    slices.append(make("label", {}, `Elements of dimension ${dim}: `, select));
  }
  function paint() {
    const visible = full.filter((chunk) =>
      [...chosen].every(
        ([dim, at]) => chunk.offsets[dim] === cuts[dim][at][0] && chunk.sizes[dim] === cuts[dim][at][1],
      ),
    );
    pager(nav, visible.length, SHARDS, "shards", (first) =>
      draw(visible.slice(first, first + SHARDS), visible.length > SHARDS),
    );
  }
  function draw(visible, paged) {
    hint();
    holder.replaceChildren();
    legend.replaceChildren();
    if (!visible.length) {
      holder.append(make("p", { class: "quiet" }, "No shard with elements is here."));
      return;
    }
    const width = Math.min(holder.clientWidth || 600, 768);
    const ratio = down === null ? 0 : shape[down] / Math.max(shape[across], 1);
    const rowsWanted = down === null ? 1 : cuts[down].length;
    const height =
      down === null ? 56 : Math.max(88, Math.min(300, width * ratio), Math.min(480, rowsWanted * (MIN_SIDE + 4)));
    const x = paged ? null : axis(shape[across], visible, across, width),
      y = paged ? null : axis(shape[down], visible, down, height);
    const inPlace = x && y;
    const map = make("div", {
      class: inPlace ? "map" : "map cells",
      role: "group",
      id,
      "aria-label": `Shard map, ${plural(visible.length, "shard")}`,
    });
    if (inPlace) map.style.height = `${height}px`;
    const boxes = visible.map((chunk) => {
      const box = make(
        "button",
        {
          type: "button",
          class: `shard${chunk.file < 0 ? " nowhere" : ""}${chunk.problems.length ? " bad" : ""}`,
          tabindex: "-1",
          "aria-label": [ownerOf(chunk.file), `chunk ${chunk.i + 1}`, ...chunk.problems.map(shown)].join(", "),
        },
        (chunk.problems.length ? "✕ " : "") + shortOwner(chunk.file),
      );
      box.style.setProperty("--hue", hueOf(chunk.file));
      if (inPlace) {
        const [left, right] =
          across === null ? [0, 1] : [x.at(chunk.offsets[across]), x.at(chunk.offsets[across] + chunk.sizes[across])];
        const [top, bottom] =
          down === null ? [0, 1] : [y.at(chunk.offsets[down]), y.at(chunk.offsets[down] + chunk.sizes[down])];
        Object.assign(box.style, {
          left: `${100 * left}%`,
          width: `${100 * (right - left)}%`,
          top: `${100 * top}%`,
          height: `${100 * (bottom - top)}%`,
        });
        box.centre = [((left + right) / 2) * width, ((top + bottom) / 2) * height];
      }
      // Not on entering: a box that scrolls under a mouse at rest must not take the line from the one with the focus.
      box.addEventListener("pointermove", (event) => {
        if (event.movementX || event.movementY) tell(detail, chunk, n);
      });
      box.addEventListener("focus", () => {
        tell(detail, chunk, n);
        boxes.forEach((other) => (other.tabIndex = -1));
        box.tabIndex = 0;
      });
      return box;
    });
    boxes[0].tabIndex = 0;
    map.append(...boxes);
    map.addEventListener("keydown", (event) => steer(event, boxes, inPlace));
    holder.append(
      map,
      make(
        "div",
        { class: "axes" },
        ...(inPlace
          ? [
              down === null
                ? null
                : make(
                    "span",
                    {},
                    `↓ dimension ${down}, ${plural(shape[down], "element")}${y.scaled ? "" : ", not to scale"}`,
                  ),
              across === null
                ? null
                : make(
                    "span",
                    {},
                    `→ dimension ${across}, ${plural(shape[across], "element")}${x.scaled ? "" : ", not to scale"}`,
                  ),
            ]
          : [make("span", {}, "a cell for each shard, in the order of the metadata, not to scale")]
        ).filter(Boolean),
        ...shape
          .map((length, dim) => [length, dim])
          .filter(([, dim]) => inPlace && dim !== down && dim !== across && !chosen.has(dim))
          .map(([length, dim]) => make("span", {}, `dimension ${dim}, ${plural(length, "element")}, is not cut`)),
        make(
          "span",
          {},
          "numbers are " +
            (visible.some((chunk) => chunk.file >= 0 && data.files[chunk.file][2] === null) ? "files" : "ranks"),
        ),
      ),
    );
    const owners = [...new Set(visible.map((chunk) => chunk.file))]
      .filter((file) => file >= 0)
      .sort((a, b) => (data.files[a][2] ?? a) - (data.files[b][2] ?? b));
    for (const file of owners.slice(0, LEGEND)) {
      const chip = make("span", { class: "chip" }, `${shortOwner(file)}: ${shown(data.files[file][0])}`);
      chip.style.setProperty("--hue", hueOf(file));
      legend.append(chip);
    }
    if (owners.length > LEGEND)
      legend.append(make("span", { class: "quiet" }, `and ${plural(owners.length - LEGEND, "file")} more`));
  }
  if (full.length) paint();
  else {
    holder.append(make("p", { class: "quiet" }, "All its chunks are empty."));
    detail.remove();
  }
  if (empty.length)
    place.append(
      make(
        "p",
        { class: "quiet" },
        `${plural(empty.length, "empty chunk")}: ` +
          empty
            .slice(0, 12)
            .map((chunk) => `${list(chunk.offsets)} of ${ownerOf(chunk.file)}`)
            .join(", ") +
          (empty.length > 12 ? ", …" : ""),
      ),
    );
  place.append(chunkList(chunks, data.replicas.find(([owner]) => owner === index)?.[1] ?? []));
}

/** Move the focus: to the nearest box in that direction, or along the row of cells. */
function steer(event, boxes, inPlace) {
  const at = boxes.indexOf(document.activeElement);
  const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  let next = event.key === "Home" ? 0 : event.key === "End" ? boxes.length - 1 : -1;
  if (at < 0 || (next < 0 && !direction)) return;
  event.preventDefault();
  if (direction && inPlace) {
    const [x, y] = boxes[at].centre;
    let best = Infinity;
    boxes.forEach((box, i) => {
      const dx = box.centre[0] - x,
        dy = box.centre[1] - y;
      const along = dx * direction[0] + dy * direction[1],
        aside = Math.abs(dx * direction[1]) + Math.abs(dy * direction[0]);
      if (along > 0.5 && along + 3 * aside < best) {
        best = along + 3 * aside;
        next = i;
      }
    });
  } else if (direction) {
    const perRow = boxes.filter((box) => box.offsetTop === boxes[0].offsetTop).length;
    next = at + direction[0] + direction[1] * perRow;
  }
  if (next < 0 && direction) next = at + direction[0] + direction[1];
  boxes[next]?.focus();
}

function chunkList(chunks, copies) {
  const details = make(
    "details",
    {},
    make("summary", {}, `List of ${plural(chunks.length + copies.length, "chunk")}`),
  );
  const rows = [
    ...chunks,
    ...copies.map(([offsets, sizes, file, byteOffset, nbytes]) => ({
      i: -1,
      offsets,
      sizes,
      file,
      byteOffset,
      nbytes,
      problems: [],
    })),
  ];
  details.addEventListener("toggle", () => {
    if (!details.open || details.childElementCount > 1) return;
    const place = make("div"),
      nav = make("nav", { class: "pages", "aria-label": "Pages of chunks" });
    details.append(place, nav);
    pager(nav, rows.length, CHUNK_ROWS, "chunks", (first) =>
      place.replaceChildren(
        table(
          [
            ["chunk", "right"],
            ["offsets", "num"],
            ["sizes", "num"],
            ["file", "name mono"],
            ["byte range", "num"],
          ],
          rows
            .slice(first, first + CHUNK_ROWS)
            .map((chunk) => [
              chunk.i < 0 ? "copy" : count(chunk.i + 1),
              list(chunk.offsets),
              list(chunk.sizes),
              chunk.file < 0 ? "none" : shown(data.files[chunk.file][0]),
              placeOf(chunk) + (chunk.problems.length ? "; " + chunk.problems.map(shown).join("; ") : ""),
            ]),
          "Chunks",
        ),
      ),
    );
  });
  return details;
}
