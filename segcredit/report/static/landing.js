// What the page opens on: results, and a held-out prompt before and after training.

// the same samples at the first and at the last evaluation; null if they were not recorded twice
const heldOutPairs = async (files) => {
  const held = files.filter((file) => file.kind === "watched" && file.run === 0);
  if (held.length < 2) return null;
  const [first, last] = [held[0], held.at(-1)];
  const [before, after] = [await load(first), await load(last)];
  const pairs = after.rows.map((row) => ({ row, twin: twinOf(row, after.rows, before.rows) })).filter((x) => x.twin);
  return pairs.length ? { first, last, before, after, pairs } : null;
};
// the response to the same prompt in another file; the n-th sample is paired with the n-th
const twinOf = (row, rows, others) => {
  const same = others.filter((x) => x.id === row.id);
  return same[rows.filter((x) => x.id === row.id).indexOf(row)] ?? same[0];
};
// one scale for all these responses, and one y-axis for those that are shown, so that both are comparable
const scalesFor = (rows, shown) => ({
  ...Object.fromEntries(COLORINGS.map((x) => [x.key, x.scale(rows.flatMap((row) => row[x.key] ?? []))])),
  axis: extent(shown.flatMap((row) => [...(row.value ?? []), row.reward, 0])),
});

const landing = {
  place: 0,
  asked: 0,

  // results in one line
  headline(run) {
    const facts = new Map(run.facts);
    const steps = Object.values(run.curves).flatMap((found) => Object.values(found).map(([all]) => all.at(-1)));
    const shown = run.results.filter((row) => row.share && row.label.endsWith("accuracy"));
    const main = shown.length ? shown : run.results.filter((row) => row.label.endsWith("reward"));
    return el("div", { class: "card headline" },
      el("p", { class: "stat" }, el("span", { class: "quiet", text: steps.length ? stepLabel(run, Math.max(...steps)) : "no step yet" }),
        el("span", { text: visible(["method", "model", "data"].map((x) => facts.get(x)).filter(Boolean).map((x) => beginning(x, 80)).join(" · ")) })),
      main.map((row) => { const [before, after, change] = row.texts;
        return el("p", { class: "stat" }, el("span", { class: "quiet", text: `held-out ${row.label}${run.prompts ? `, ${run.prompts} prompt${run.prompts === 1 ? "" : "s"}` : ""}` }), el("span", {}, el("span", { class: "quiet", text: isNumber(row.after[0]) ? `${before} → ` : "before " }), el("strong", { text: isNumber(row.after[0]) ? after : before }), isNumber(row.after[0]) ? ` ${change}${noise(row)}` : "")); }),
      main.length ? null : el("p", { class: "quiet", text: "No evaluation was recorded yet." }));
  },

  // fills `place` when the responses are read; keeps what is there until then
  async draw(data, node) {
    const asked = ++this.asked;
    const found = await heldOutPairs(data.files);
    const file = found ? null : data.files.findLast((x) => x.kind === "rollouts" && x.run === 0);
    const only = file && await load(file);
    if (asked !== this.asked) return; // drawn again meanwhile
    if (found) node.replaceChildren(this.pair(data, node, found));
    else if (only?.rows.length) node.replaceChildren(this.single(data, file, only));
    else node.replaceChildren();
  },

  pair(data, node, { first, last, before, after, pairs }) {
    this.place = clamp(this.place, 0, pairs.length - 1);
    const { row, twin } = pairs[this.place];
    const scales = scalesFor([...before.rows, ...after.rows], [row, twin]);
    const [from, to] = [first, last].map((file) => stepLabel(data.runs[0], file.step, true).split(", ")); // the stage once
    const label = (when, parts) => `${when}: ${(from[0] === to[0] ? parts.slice(-1) : parts).join(", ")}`;
    const move = (by) => { this.place += by; node.replaceChildren(this.pair(data, node, { first, last, before, after, pairs })); byId(by < 0 ? "pair-previous" : "pair-next")?.focus(); };
    return this.frame(data, row, "One held-out prompt, before and after training", [
      responsePanel(twin, before.texts, scales, this.color(row), label("before", from), true).node,
      responsePanel(row, after.texts, scales, this.color(row), label("after", to), true).node,
    ], pairs.length > 1 ? el("span", { class: "steps" },
      el("button", { type: "button", id: "pair-previous", "aria-label": "previous prompt", disabled: this.place === 0, onclick: () => move(-1), text: "←" }),
      el("button", { type: "button", id: "pair-next", "aria-label": "next prompt", disabled: this.place === pairs.length - 1, onclick: () => move(1), text: "→" }),
      el("span", { class: "quiet", text: `${this.place + 1} of ${pairs.length}` })) : null);
  },

  single(data, file, { rows, texts }) {
    const [row] = rows;
    const panel = responsePanel(row, texts, scalesFor(rows, [row]), this.color(row), stepLabel(data.runs[0], file.step)).node;
    panel.classList.add("alone");
    return this.frame(data, row, "One response", [panel], null);
  },

  color: (row) => (row.value ? "value" : "entropy"),

  frame(data, row, title, panels, more) {
    const terms = data.picture.filter(([, column]) => (column === "segment" ? row.segment.length : row[column]));
    return el("section", { class: "pair", "aria-label": title },
      el("div", { class: "pair-title" }, el("h2", { text: title }), more, el("a", { href: "#trajectories", text: "all recorded responses" })),
      el("div", { class: "pair-columns" },
        panels,
        el("div", { class: "side" }, el("div", { class: "card prompt" }, promptNodes(row, 0)), terms.length ? el("dl", { class: "card terms", "aria-label": "Terms" }, terms.map(([term, , meaning]) => el("div", {}, el("dt", { text: term }), el("dd", { text: meaning })))) : null)));
  },
};
