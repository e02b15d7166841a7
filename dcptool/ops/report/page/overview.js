// The upper half of the page: totals, findings, bytes by group, balance of the files.

// Header and findings.

const SIGNS = { error: "✕", warning: "!", note: "i", good: "✓" };
const badge = (kind, text) =>
  make("span", { class: `badge ${kind}` }, make("span", { "aria-hidden": "true" }, SIGNS[kind] + " "), text);
const LEVELS = {
  metadata: "metadata and sizes; contents not read",
  records: "the headers of every item",
  deep: "every byte and every checksum",
};
const unread = () =>
  data.checked.n_unread ? `, but ${plural(data.checked.n_unread, "item")} could not be read` : "";
const total = data.tensors.reduce((sum, tensor) => sum + tensor[NBYTES], 0);

function header() {
  byId("name").textContent = shown(data.path.replace(/\/+$/, "").split("/").pop() || data.path);
  byId("path").textContent = shown(data.path);
  const errors = data.findings.reduce((sum, group) => sum + (group.severity === "error" ? group.count : 0), 0);
  const warnings = data.findings.reduce((sum, group) => sum + (group.severity === "warning" ? group.count : 0), 0);
  byId("state").append(
    badge(data.state === "complete" ? "good" : data.state === "damaged" || errors ? "error" : "warning", data.state),
  );
  if (errors) byId("state").append(badge("error", plural(errors, "error")));
  if (warnings) byId("state").append(badge("warning", plural(warnings, "warning")));
  byId("state").append(make("span", { class: "quiet" }, `checked: ${LEVELS[data.level]}${unread()}`));
  const nChunks = data.tensors.reduce((sum, tensor) => sum + tensor[COUNT], 0);
  const elements = data.tensors.reduce((sum, tensor) => sum + volume(tensor[SHAPE]), 0);
  const there = data.files.filter((file) => file[1] !== null).length;
  const tile = (id, value, what, more) =>
    make("li", { id }, make("b", {}, value), `${what}`, make("small", {}, more));
  byId("totals").append(
    tile("total-tensors", count(data.tensors.length), "tensors", `${size(total)}, ${count(elements)} elements`),
    tile(
      "total-chunks",
      count(nChunks),
      "chunks",
      data.tensors.length ? `${size(Math.round(total / Math.max(nChunks, 1)))} each on average` : "none",
    ),
    tile("total-objects", count(data.objects.length), "objects", "what is no tensor"),
    tile(
      "total-files",
      count(there),
      "files",
      `${size(data.nbytes)} on disk${there < data.files.length ? `, ${count(data.files.length - there)} missing` : ""}`,
    ),
    tile("total-ranks", data.world_size === null ? "?" : count(data.world_size), "ranks", "saved it, by file names"),
  );
  const marker = data.marker;
  const facts = [
    ["Flavour", shown(data.flavour)],
    ["Evidence", data.evidence.length ? data.evidence.map(shown).join("; ") : "none"],
    [
      "Marker",
      !marker
        ? "none"
        : !marker.writer
          ? `${shown(marker.name)}, another software's`
          : `${shown(marker.name)} by ${shown(marker.writer)}, ${shown(String(marker.created))}` +
            (marker.checksums ? ", with checksums" : ""),
    ],
  ];
  const shownEntries = data.tensors.length + data.objects.length;
  if (shownEntries !== data.n_entries)
    facts.push(["Selected", `${count(shownEntries)} of ${count(data.n_entries)} entries`]);
  if (data.level !== "metadata")
    facts.push(["Checked", `${plural(data.checked.n_items, "item")}, ${size(data.checked.nbytes)}${unread()}`]);
  for (const [term, text] of facts) byId("facts").append(make("dt", {}, term), make("dd", {}, text));
  byId("footer").textContent =
    `Written by dcptool ${data.version}, ${data.created}. This page loads nothing and sends nothing.`;
}

function findings() {
  const place = byId("finding-list");
  if (!data.findings.some((group) => group.severity !== "note")) {
    place.append(
      make(
        "p",
        { class: "finding" },
        badge("good", "nothing wrong"),
        ` as far as was looked: ${LEVELS[data.level]}.`,
      ),
    );
  }
  for (const group of data.findings) {
    const item = ([text, tensor]) =>
      make(
        "li",
        {},
        lines(text),
        tensor === null
          ? null
          : make(
              "div",
              {},
              make("button", { class: "plain", type: "button", onclick: () => goTo(tensor) }, "Show this tensor"),
            ),
      );
    const shownFirst = group.messages.slice(0, 3),
      rest = group.messages.slice(3);
    const cut = group.count - group.messages.length;
    place.append(
      make(
        "div",
        { class: `finding ${group.severity}` },
        make(
          "h3",
          {},
          badge(group.severity, group.severity),
          make("code", {}, group.kind),
          group.count > 1 ? make("span", { class: "quiet" }, count(group.count)) : null,
        ),
        make("ul", {}, ...shownFirst.map(item)),
        rest.length
          ? make(
              "details",
              {},
              make("summary", {}, `${count(group.count - 3)} more like these`),
              make(
                "ul",
                {},
                ...rest.map(item),
                ...(cut
                  ? [
                      make(
                        "li",
                        { class: "quiet" },
                        `… and ${count(cut)} that only dcptool verify --json lists; ` +
                          `the maps mark the first ${count(group.messages.length)}`,
                      ),
                    ]
                  : []),
              ),
            )
          : null,
        ...group.steps.map((step) => make("p", { class: "step" }, lines(step))),
      ),
    );
  }
}

// Bytes by group.

/** Names as a tree of their dotted parts; a node with one child is one with it. */
function tree(indexes, depth) {
  const groups = new Map();
  for (const index of indexes) {
    const part = data.tensors[index][FQN].split(".")[depth];
    if (!groups.has(part)) groups.set(part, []);
    groups.get(part).push(index);
  }
  return [...groups]
    .map(([name, members]) => {
      let next = depth + 1;
      const parts = members.map((index) => data.tensors[index][FQN].split("."));
      while (members.length > 1 && parts.every((found) => found.length > next + 1 && found[next] === parts[0][next]))
        name += "." + parts[0][next++];
      const isLeaf = members.length === 1 || parts.some((found) => found.length <= next);
      if (members.length === 1) name = parts[0].slice(depth).join(".");
      return {
        name,
        members,
        next,
        isLeaf,
        nbytes: members.reduce((sum, index) => sum + data.tensors[index][NBYTES], 0),
      };
    })
    .sort((a, b) => b.nbytes - a.nbytes);
}

function branches(nodes, place, largest, limit = BRANCHES) {
  for (const node of nodes.slice(0, limit)) {
    const opened = make("ul", { hidden: true });
    const button = make(
      "button",
      { class: "branch", type: "button" },
      make("span", { class: "sign", "aria-hidden": "true" }, node.isLeaf ? "" : "›"),
      named(node.name + (node.isLeaf ? "" : ".")),
      make("span", { class: "bar-box" }, bar(largest ? node.nbytes / largest : 0)),
      make("span", { class: "size" }, `${size(node.nbytes)}, ${percent(node.nbytes, total)}`),
    );
    if (node.isLeaf) {
      button.addEventListener("click", () => goTo(node.members[0]));
      button.setAttribute("title", "Show this tensor");
    } else {
      button.setAttribute("aria-expanded", "false");
      button.append(make("span", { class: "hidden" }, `, ${plural(node.members.length, "tensor")}`));
      button.addEventListener("click", () => {
        const open = button.getAttribute("aria-expanded") !== "true";
        button.setAttribute("aria-expanded", String(open));
        opened.hidden = !open;
        if (open && !opened.childElementCount) branches(tree(node.members, node.next), opened, largest);
      });
    }
    place.append(make("li", {}, button, node.isLeaf ? null : opened));
  }
  if (nodes.length > limit) {
    const more = make(
      "button",
      { class: "plain", type: "button" },
      `Show ${count(Math.min(nodes.length - limit, 200))} more of ${count(nodes.length - limit)}`,
    );
    const last = make("li", {}, more);
    more.addEventListener("click", () => {
      last.remove();
      branches(nodes.slice(limit), place, largest, 200);
    });
    place.append(last);
  }
}

function groups() {
  if (!data.tensors.length) {
    byId("group-tree").append(make("p", { class: "card quiet" }, "There are no tensors."));
    return;
  }
  const nodes = tree([...data.tensors.keys()], 0);
  const top = make("ul", { class: "tree" });
  byId("group-tree").append(top);
  branches(nodes, top, nodes[0].nbytes);
  const only = nodes.length === 1 && !nodes[0].isLeaf && top.querySelector(".branch");
  if (only) only.click();
}

// Balance of the files.

function files() {
  const loads = new Map();
  for (const [, , rank, , nbytes] of data.files) if (rank !== null) loads.set(rank, (loads.get(rank) ?? 0) + nbytes);
  for (let rank = 0; rank < Math.min(data.world_size ?? 0, 1e6) && loads.size; rank++)
    if (!loads.has(rank)) loads.set(rank, 0);
  const sum = [...loads.values()].reduce((a, b) => a + b, 0);
  if (loads.size > 1 && sum) {
    let heaviest = 0,
      lightest = 0;
    for (const [rank, load] of loads) {
      if (load > (loads.get(heaviest) ?? -1)) heaviest = rank;
      if (load < (loads.get(lightest) ?? Infinity)) lightest = rank;
    }
    const mean = sum / loads.size;
    byId("balance").textContent =
      `Rank ${heaviest} holds most: ${size(loads.get(heaviest))}, ${(loads.get(heaviest) / mean).toFixed(2)} × ` +
      `the mean of ${plural(loads.size, "rank")}. Rank ${lightest} holds least: ${size(loads.get(lightest))}.`;
  }
  const used = data.files.filter((file) => file[3] || file[1] === null);
  const sorted = [...used].sort((a, b) => (a[2] ?? Infinity) - (b[2] ?? Infinity) || (a[0] < b[0] ? -1 : 1));
  const largest = used.reduce((most, file) => Math.max(most, file[4]), 1);
  const all = used.reduce((most, file) => most + file[4], 0);
  const place = make("div"),
    nav = make("nav", { class: "pages", "aria-label": "Pages of files" });
  const rest = data.files.length - used.length;
  const choose = make(
    "select",
    { "aria-label": "Order of the files" },
    make("option", { value: "rank" }, "by rank"),
    make("option", { value: "most" }, "most bytes first"),
    make("option", { value: "least" }, "fewest bytes first"),
  );
  const draw = (rows) =>
    pager(nav, rows.length, FILE_ROWS, "files", (first) => {
      place.replaceChildren(
        table(
          [
            ["file", "name mono"],
            ["rank", "right"],
            ["items", "right"],
            ["in items", "right"],
            ["share", "wide"],
            ["size on disk", "right"],
          ],
          rows
            .slice(first, first + FILE_ROWS)
            .map(([name, nbytes, rank, items, inItems]) => [
              make("td", { class: "name mono" }, shown(name)),
              rank === null ? "–" : String(rank),
              count(items),
              size(inItems),
              make(
                "td",
                { class: "wide" },
                make("span", { class: "num" }, percent(inItems, all)),
                bar(inItems / largest),
              ),
              make(
                "td",
                { class: nbytes === null ? "right missing" : "right" },
                nbytes === null ? "missing" : size(nbytes),
              ),
            ]),
          "Files",
        ),
      );
    });
  if (used.length > FILE_ROWS) byId("file-table").append(make("div", { class: "tools" }, choose));
  choose.addEventListener("change", () =>
    draw(
      choose.value === "rank"
        ? sorted
        : [...used].sort((a, b) => (choose.value === "most" ? b[4] - a[4] : a[4] - b[4])),
    ),
  );
  byId("file-table").append(place, nav);
  if (used.length) draw(sorted);
  if (rest) {
    const names = data.files.filter((file) => !used.includes(file));
    byId("file-table").append(
      make(
        "p",
        { class: "quiet" },
        `And ${plural(rest, "file")} without items: `,
        ...names.slice(0, 12).flatMap((file, i) => [i ? ", " : "", named(file[0]), ` (${size(file[1])})`]),
        rest > 12 ? ", …" : "",
      ),
    );
  }
}
