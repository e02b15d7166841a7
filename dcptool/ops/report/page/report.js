// The list of tensors with its filter, the objects, and the start of it all.

// The list of tensors.

let matching = [...data.tensors.keys()];

function tensorRow(index) {
  const tensor = data.tensors[index];
  const panel = make("div", { class: "panel", hidden: true, id: `tensor${index}` });
  const flagged = marks.has(index);
  const button = make(
    "button",
    { class: "row", type: "button", "aria-expanded": "false", "aria-controls": panel.id },
    make("span", { class: "sign", "aria-hidden": "true" }, "›"),
    named(tensor[FQN]),
    flagged ? make("span", { class: "flag" }, "see findings") : make("span"),
    make(
      "span",
      { class: "meta num" },
      [data.dtypes[tensor[DTYPE]], shapeOf(tensor[SHAPE]), size(tensor[NBYTES]), data.layouts[tensor[LAYOUT]]]
        .map(shown)
        .join(" · "),
    ),
  );
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-expanded") !== "true";
    button.setAttribute("aria-expanded", String(open));
    panel.hidden = !open;
    if (open && !panel.childElementCount) shardMap(index, panel);
  });
  return make("li", { "data-tensor": index }, button, panel);
}

function showTensors(first = 0) {
  byId("matches").textContent = `${count(matching.length)} of ${plural(data.tensors.length, "tensor")}`;
  pager(
    byId("tensor-pages"),
    matching.length,
    ROWS,
    "tensors",
    (from) => byId("tensor-list").replaceChildren(...matching.slice(from, from + ROWS).map(tensorRow)),
    first,
  );
  byId("tensor-list").hidden = !matching.length;
}

/** Part of a name, whatever its case; with * or ? a glob on whole names. */
function filter(pattern) {
  const folded = pattern.trim().toLowerCase();
  let fits = (name) => name.toLowerCase().includes(folded);
  if (/[*?]/.test(folded)) {
    const glob = new RegExp(
      "^" +
        folded
          .replace(/[.+^${}()|[\]\\]/g, "\\$&")
          .replace(/\*+/g, ".*")
          .replace(/\?/g, ".") +
        "$",
      "su",
    );
    fits = (name) => glob.test(name.toLowerCase());
  }
  matching = [...data.tensors.keys()].filter((index) => fits(data.tensors[index][FQN]));
  showTensors();
}

function goTo(index) {
  byId("filter").value = "";
  filter("");
  showTensors(Math.floor(index / ROWS) * ROWS);
  const button = document.querySelector(`[data-tensor="${index}"] .row`);
  if (button.getAttribute("aria-expanded") !== "true") button.click();
  button.focus({ preventScroll: true });
  button.scrollIntoView({ block: "start" });
}

// Objects.

function objects() {
  if (!data.objects.length) {
    byId("object-table").append(make("p", { class: "card quiet" }, "There are no objects."));
    return;
  }
  const place = make("div"),
    nav = make("nav", { class: "pages", "aria-label": "Pages of objects" });
  byId("object-table").append(place, nav);
  pager(nav, data.objects.length, CHUNK_ROWS, "objects", (first) =>
    place.replaceChildren(
      table(
        [
          ["object", "name mono"],
          ["class", "name"],
          ["value", "name wide"],
          ["stored in", "name"],
        ],
        data.objects
          .slice(first, first + CHUNK_ROWS)
          .map(([fqn, kind, text, error, file, byteOffset, nbytes]) => [
            make("td", { class: "name mono" }, shown(fqn)),
            kind === null ? "?" : shown(kind),
            error !== null ? `(${shown(error)})` : (text ?? "(not decoded)"),
            file < 0 ? "–" : `${shown(data.files[file][0])}, ${placeOf({ file, byteOffset, nbytes })}`,
          ]),
        "Objects",
      ),
    ),
  );
}

header();
findings();
groups();
files();
byId("filter").addEventListener("input", (event) => filter(event.target.value));
showTensors();
objects();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
