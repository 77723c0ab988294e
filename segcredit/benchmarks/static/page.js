// The tables of the paper, and the answers.

const found = embedded("data");
const answers = found.sets.length ? answersView(found, embedded("images")) : null;

const drawTable = (table) => el("div", { class: "card wide" },
  el("h2", { text: table.number === null ? table.title : `Table ${table.number}: ${table.title}` }),
  el("table", { class: "results" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "model" }), table.columns.map((x) => el("th", { scope: "col", text: x })))),
    el("tbody", {}, table.rows.map((row) => el("tr", { class: row.paper ? "paper" : "ours" },
      el("th", { scope: "row", text: visible(row.paper ? `paper: ${row.name}` : row.name) }),
      row.values.map((x) => el("td", { text: percent(x) })))))));

fill(byId("view-tables"), [found.tables.map(drawTable), found.sets.map((set) => allScores(found, set))]);
if (answers) byId("view-answers").append(answers.node);

// ── Views, keys, theme ──────────────────────────────────────────────────────────────────────────

const view = () => {
  const now = address.read().view === "answers" ? "answers" : "tables";
  for (const name of ["tables", "answers"]) {
    byId(`view-${name}`).hidden = name !== now;
    const link = document.querySelector(`[data-view="${name}"]`);
    if (name === now) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
};
addEventListener("hashchange", view);
addEventListener("keydown", (event) => {
  if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  answers?.key(event);
});
byId("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; });
view();
