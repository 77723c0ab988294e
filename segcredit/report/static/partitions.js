// One response under every partition.

const partitionsView = {
  state: { file: null, row: 0 },

  async draw(data, settings = {}) {
    this.data = data;
    Object.assign(this.state, settings);
    const view = byId("view-partitions");
    if (!data.files.length) { view.replaceChildren(el("p", { class: "card", text: noResponses(data) })); return; }
    const known = data.files.map(fileName);
    if (!known.includes(this.state.file)) this.state.file = trajectoriesView.state.file ?? known.at(-1);
    const { rows, texts, error } = await load(data.files[known.indexOf(this.state.file)]);
    const place = clamp(Math.floor(Number(this.state.row)) || 0, 0, Math.max(rows.length - 1, 0));
    this.count = rows.length;
    this.state.row = place;
    address.write("partitions", { file: this.state.file, row: place });
    const row = rows[place];
    const again = (change) => this.draw(data, change);
    view.replaceChildren(
      el("div", { class: "controls" },
        el("label", {}, "Step ", el("select", { id: "cut-file", onchange: (event) => again({ file: event.target.value, row: 0 }) }, data.files.map((file) => el("option", { value: fileName(file), text: trajectoriesView.fileLabel.call({ data }, file), selected: fileName(file) === this.state.file })))),
        el("label", {}, "Response ", el("select", { id: "cut-row", onchange: (event) => again({ row: Number(event.target.value) }) }, rows.map((x, i) => el("option", { value: i, text: `${i + 1}: ${MARKS[grade(x)]} ${x.length} tokens`, selected: i === place }))))),
      el("p", { class: "quiet", text: "A mark shows where a segment ends; shades separate neighboring segments. Below each response: the number of segments and their mean length." }),
      row ? el("div", { class: "cuts" }, this.recorded(row, texts), data.partitions.map((name, i) => this.card(name, row, texts, row.cuts[i] ?? []))) : el("p", { class: "card", text: error ? visible(error) : "No response was recorded at this step." }));
  },

  recorded(row, texts) {
    if (!row.segment.length) return [];
    return [this.cardOf("As recorded: the segments that the run used", row, texts, groupsOfRow(row))];
  },

  card(name, row, texts, ends) {
    if (!ends.length) return el("article", { class: "card cut" }, el("h3", { text: name }), el("p", { class: "quiet", text: "The run did not record the columns that this partition needs." }));
    return this.cardOf(name, row, texts, groupsFrom(ends, row.pieces.length));
  },

  cardOf(name, row, texts, groups) {
    const mean = row.pieces.length / groups.length;
    return el("article", { class: "card cut" }, el("h3", { text: name }), el("div", { class: "tokens plain" }, tokenText(row, texts, groups)),
      el("p", { class: "quiet", text: `${groups.length} segment${groups.length > 1 ? "s" : ""}, ${number(Number(mean.toPrecision(3)))} token${mean === 1 ? "" : "s"} each` }));
  },

  key(event) {
    if (!this.data || this.count === undefined) return false; // not drawn yet
    if (event.key === "j") this.draw(this.data, { row: clamp(this.state.row + 1, 0, this.count - 1) });
    else if (event.key === "k") this.draw(this.data, { row: clamp(this.state.row - 1, 0, this.count - 1) });
    else return false;
    return true;
  },
};
