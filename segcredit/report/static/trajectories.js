// Choose a step, sort, filter and search responses; show one response, and the same prompt at other steps.

const SORTS = [
  ["recorded", "as recorded", null],
  ["reward", "highest reward", (row) => -(isNumber(row.reward) ? row.reward : -Infinity)],
  ["reward_up", "lowest reward", (row) => (isNumber(row.reward) ? row.reward : Infinity)],
  ["length", "longest", (row) => -row.length],
  ["length_up", "shortest", (row) => row.length],
  ["credit", "largest |Â|", (row) => -largest(row)],
];
const grade = (row) => (row.correct === true ? "right" : row.correct === false ? "wrong" : "unknown"); // a reward may not report correctness
const MARKS = { right: "✓", wrong: "✗", unknown: "·" };
const largest = (row) => (row.advantage ?? []).reduce((most, x) => (isNumber(x) ? Math.max(most, Math.abs(x)) : most), 0);
const said = (row, texts) => row.pieces.map((i) => texts[i]).join("");
const LISTED = 300;
const recorded = (data) => data.recorded.reduce((sum, run) => sum + run.rollouts + run.watched, 0);
const noResponses = (data) => recorded(data)
  ? "Each recorded response is larger than the space for one step on this page. Allow more: segcredit report --megabytes."
  : "This run has recorded no responses: either save.rollouts_every is 0, or the first recorded step is still to come.";

const trajectoriesView = {
  state: { file: null, row: 0, color: "entropy", sort: "recorded", show: "all", search: "", beside: "" },
  token: null,
  asked: 0,

  async draw(data, settings = {}) {
    this.data = data;
    Object.assign(this.state, settings);
    this.state.row = Math.floor(Number(this.state.row)) || 0;
    const view = byId("view-trajectories");
    if (!data.files.length) {
      view.replaceChildren(el("p", { class: "card", text: noResponses(data) }));
      return;
    }
    const known = data.files.map(fileName);
    if (!known.includes(this.state.file)) Object.assign(this.state, this.pair() ?? { file: known[this.latest()] });
    this.list = el("ol", { class: "responses", "aria-label": "Responses" });
    this.count = el("p", { class: "quiet", role: "status" });
    this.detail = el("div", { class: "detail" });
    view.replaceChildren(el("div", { class: "trajectories" }, el("aside", {}, this.controls(), this.count, this.list), this.detail));
    await this.open();
  },

  // a held-out prompt before and after training, colored by value; null if none was recorded twice
  pair() {
    const held = this.data.files.filter((file) => file.kind === "watched" && file.run === 0);
    const first = held[0], last = held.at(-1);
    if (first === last || !last.ids.some((id) => first.ids.includes(id))) return null;
    return { file: fileName(last), beside: fileName(first), color: "value" };
  },

  latest() {
    const training = this.data.files.map((file, i) => [file, i]).filter(([file]) => file.kind === "rollouts");
    return (training.at(-1) ?? [null, this.data.files.length - 1])[1];
  },

  controls() {
    const choose = (key, options) => el("select", { id: `choose-${key}`, onchange: (event) => this.change({ [key]: event.target.value, ...(key === "file" ? { row: 0 } : {}) }) },
      options.map(([value, text]) => el("option", { value, text, selected: value === this.state[key] })));
    return el("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      el("label", {}, "Step ", choose("file", this.data.files.map((file) => [fileName(file), this.fileLabel(file)]))),
      el("label", {}, "Sort ", choose("sort", SORTS.map(([key, text]) => [key, text]))),
      el("label", {}, "Show ", choose("show", [["all", "all"], ["right", "correct"], ["wrong", "incorrect"], ["truncated", "truncated"]])),
      el("label", {}, "Search ", el("input", { type: "search", id: "search", value: this.state.search, placeholder: "text of prompt or response", oninput: (event) => this.change({ search: event.target.value, row: 0 }) })));
  },

  fileLabel({ run, kind, step }) {
    const where = this.data.runs.length > 1 ? `${visible(this.data.runs[run].name)} · ` : "";
    return `${where}${kind === "watched" ? "held-out, " : ""}${stepLabel(this.data.runs[run], step, kind === "watched")}`;
  },

  async open() {
    const file = this.data.files[this.data.files.map(fileName).indexOf(this.state.file)];
    this.file = file;
    this.rows = await load(file);
    if (this.file !== file) return; // the user has chosen another file
    if (this.state.color === "value" && !this.rows.rows.some((row) => row.value)) this.state.color = "entropy"; // no critic
    this.refresh();
  },

  async change(settings) {
    const opened = settings.file && settings.file !== this.state.file;
    const listed = ["sort", "show", "search"].some((key) => key in settings);
    this.token = "color" in settings ? this.panel?.pointed() ?? null : null;
    Object.assign(this.state, settings);
    if (opened) { this.state.beside = ""; await this.open(); }
    else if (listed) this.refresh();
    else await this.show();
  },

  refresh() {
    const { rows, texts } = this.rows;
    const { sort, show, search } = this.state;
    const wanted = search.toLowerCase();
    const kept = rows.map((row, i) => ({ row, i })).filter(({ row }) =>
      (show === "all" || (show === "truncated" ? row.truncated : grade(row) === show)) &&
      (!wanted || said(row, texts).toLowerCase().includes(wanted) || row.id.toLowerCase().includes(wanted) || row.messages.some(([, text]) => text.toLowerCase().includes(wanted))));
    const order = SORTS.find(([key]) => key === sort)?.[2];
    if (order) kept.sort((a, b) => order(a.row) - order(b.row) || a.i - b.i);
    this.kept = kept;
    this.state.row = clamp(this.state.row, 0, Math.max(kept.length - 1, 0));
    const sampled = this.file.shown < this.file.total ? `; the page holds ${this.file.shown} of ${this.file.total} recorded responses` : "";
    const files = this.data.files.filter((file) => file.kind === this.file.kind && file.run === this.file.run).length;
    const steps = this.data.recorded[this.file.run][this.file.kind];
    this.count.textContent = `${kept.length} of ${rows.length} responses${sampled}.${files < steps ? ` ${files} of ${steps} recorded steps are on the page.` : ""}`;
    this.list.replaceChildren(...kept.slice(0, LISTED).map(({ row }, place) => el("li", {}, this.item(row, texts, place))));
    this.show();
  },

  item(row, texts, place) {
    return el("button", { type: "button", class: "item", "aria-current": place === this.state.row ? "true" : null, onclick: () => this.change({ row: place }) },
      el("span", { class: `mark ${grade(row)}`, text: MARKS[grade(row)] }),
      el("span", { class: "item-numbers", text: `${number(row.reward)} · ${row.length} tokens${row.advantage ? ` · |Â| ≤ ${number(largest(row))}` : ""}${row.truncated ? " · truncated" : ""}` }),
      el("bdi", { class: "item-text", text: visible(beginning(said(row, texts), 90)).replaceAll("\n", " ") }));
  },

  async show() {
    for (const button of this.list.querySelectorAll("[aria-current]")) button.removeAttribute("aria-current");
    const item = this.list.children[this.state.row]?.firstChild;
    item?.setAttribute("aria-current", "true");
    if (item) reveal(item, this.list);
    const { file, row, color, sort, show, search, beside } = this.state;
    address.write("trajectories", { file, row, color, sort, show, ...(search ? { search } : {}), ...(beside ? { beside } : {}) });
    const found = this.kept[row];
    if (!found) { this.panel = null; this.detail.replaceChildren(el("p", { class: "card", text: this.rows.error ? visible(this.rows.error) : "No response matches." })); return; }
    const asked = ++this.asked;
    const other = this.data.files.find((x) => fileName(x) === beside);
    const others = other ? await load(other) : { rows: [] };
    if (asked !== this.asked) return; // the user has chosen something else
    // one scale for both panels and for all responses of the step, so that colors are comparable
    const all = [...this.rows.rows, ...others.rows];
    const twin = twinOf(found.row, this.rows.rows, others.rows);
    const scales = scalesFor(all, twin ? [found.row, twin] : [found.row]);
    this.panel = responsePanel(found.row, this.rows.texts, scales, color, this.fileLabel(this.file), Boolean(twin));
    const columns = el("div", { class: "beside" }, twin ? responsePanel(twin, others.texts, scales, color, this.fileLabel(other), true).node : null, this.panel.node);
    const held = this.detail.contains(document.activeElement) ? document.activeElement : null;
    const same = !held ? "" : held.id ? `#${held.id}` : held.dataset.color ? `[data-color="${held.dataset.color}"]` : ".response:last-child .tokens";
    this.detail.replaceChildren(
      this.bar(found.row),
      el("article", { class: "card prompt" }, promptNodes(found.row, this.file.run)),
      columns);
    if (same) this.detail.querySelector(same)?.focus({ preventScroll: true }); // keep the focus
    if (this.token !== null) this.panel.point(this.token);
  },

  bar(row) {
    const colors = el("div", { class: "choices", role: "radiogroup", "aria-label": "Color" }, COLORINGS.flatMap((x, i) => x.special && !row[x.key] ? [] : [el("button", {
      type: "button", role: "radio", class: "choice", "data-color": x.key, disabled: !row[x.key], title: `${x.about} (key ${i + 1})`,
      "aria-checked": String(x.key === this.state.color), onclick: () => this.change({ color: x.key }) }, `${x.label} `, el("span", { class: "sign", text: x.sign }))]));
    return el("div", { class: "detail-bar" },
      el("div", { class: "steps" },
        el("button", { type: "button", id: "previous", onclick: () => this.move(-1), text: "← previous" }),
        el("button", { type: "button", id: "next", onclick: () => this.move(1), text: "next →" }),
        el("span", { class: "quiet", text: `${this.state.row + 1} of ${this.kept.length}` })),
      colors, this.besideChoice(row));
  },

  // the same prompt at other steps or in other runs
  besideChoice(row) {
    const same = this.data.files.filter((file) => file !== this.file && (file.ids.includes(row.id) || (this.data.live && file.kind === "watched" && this.file.kind === "watched")));
    return el("label", {}, "Same prompt at ", el("select", { id: "beside", disabled: !same.length, onchange: (event) => this.change({ beside: event.target.value }) },
      el("option", { value: "", text: same.length ? "no other step" : "– (sampled only once)" }),
      same.map((file) => el("option", { value: fileName(file), text: this.fileLabel(file), selected: fileName(file) === this.state.beside }))));
  },

  move(by) { if (this.kept?.length) this.change({ row: clamp(this.state.row + by, 0, this.kept.length - 1) }); },

  moveStep(by) {
    const same = this.data.files.filter((file) => file.kind === this.file.kind && file.run === this.file.run);
    const next = same[same.indexOf(this.file) + by];
    if (!next) return;
    byId("choose-file").value = fileName(next);
    this.change({ file: fileName(next) });
  },

  nextColor() {
    const able = COLORINGS.filter((x) => this.panel?.row[x.key]).map((x) => x.key);
    if (able.length) this.change({ color: able[(able.indexOf(this.state.color) + 1) % able.length] });
  },

  moveToken(by, whole) {
    if (!this.panel) return;
    this.token = this.panel.moved(by, whole);
    this.panel.point(this.token);
    this.panel.reveal();
  },

  key(event) {
    if (!this.data) return false; // not drawn yet
    const n = Number(event.key);
    if (event.key === "j") this.move(1);
    else if (event.key === "k") this.move(-1);
    else if (event.key === "c") this.nextColor();
    else if (n >= 1 && n <= COLORINGS.length) { const { key } = COLORINGS[n - 1]; if (this.panel?.row[key]) this.change({ color: key }); }
    else if (event.key === "ArrowRight") this.moveToken(1, event.shiftKey);
    else if (event.key === "ArrowLeft") this.moveToken(-1, event.shiftKey);
    else if (event.key === "[") this.moveStep(-1);
    else if (event.key === "]") this.moveStep(1);
    else if (event.key === "/") byId("search")?.focus();
    else return false;
    return true;
  },
};
