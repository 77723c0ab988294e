// Tables of scores, and the questions with every model's response, answer and verdict.

const found = embedded("data");
const pictures = embedded("images");
const percent = (x) => (isNumber(x) ? x.toFixed(2) : "–");

// ── Tables ──────────────────────────────────────────────────────────────────────────────────────

const drawTable = (table) => el("div", { class: "card wide" },
  el("h2", { text: table.number === null ? table.title : `Table ${table.number}: ${table.title}` }),
  el("table", { class: "results" },
    el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "model" }), table.columns.map((x) => el("th", { scope: "col", text: x })))),
    el("tbody", {}, table.rows.map((row) => el("tr", { class: row.paper ? "paper" : "ours" },
      el("th", { scope: "row", text: visible(row.paper ? `paper: ${row.name}` : row.name) }),
      row.values.map((x) => el("td", { text: percent(x) })))))));

const drawScores = (set) => {
  const metrics = [...new Set(Object.values(set.scores).flatMap(Object.keys))];
  return el("details", { class: "card" },
    el("summary", { text: `${set.title}: all metrics, with 95 % intervals` }),
    el("div", { class: "wide" }, el("table", { class: "results" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col", text: "metric" }), found.models.map((x) => el("th", { scope: "col", text: visible(x) })))),
      el("tbody", {}, metrics.map((name) => el("tr", {}, el("th", { scope: "row", text: visible(name) }),
        found.models.map((model) => {
          const x = set.scores[model]?.[name];
          return el("td", { text: x ? `${percent(x.value)} (${x.low.toFixed(1)} – ${x.high.toFixed(1)}, n = ${x.count})` : "–" });
        })))))));
};

fill(byId("view-tables"), [found.tables.map(drawTable), found.sets.map(drawScores)]);

// ── Answers ─────────────────────────────────────────────────────────────────────────────────────

const VERDICTS = {
  all: () => true,
  wrong: (x) => !x.correct,
  right: (x) => x.correct,
  "no answer": (x) => x.answer === null,
};
const chosen = { set: 0, model: 0, verdict: "wrong", text: "", place: 0 };

const options = (names) => names.map((name, place) => el("option", { value: place, text: visible(name) }));
const picker = (label, names, change) => {
  const node = el("select", { onchange: () => { change(node.selectedIndex); chosen.place = 0; list(); } }, options(names));
  return [node, el("label", {}, label, node)];
};
const [setNode, setLabel] = picker("set", found.sets.map((x) => x.title), (x) => { chosen.set = x; });
const [modelNode, modelLabel] = picker("model", found.models, (x) => { chosen.model = x; });
const [verdictNode, verdictLabel] = picker("show", Object.keys(VERDICTS), (x) => { chosen.verdict = Object.keys(VERDICTS)[x]; });
verdictNode.selectedIndex = 1;
const search = el("input", { type: "search", placeholder: "text", oninput: () => { chosen.text = search.value.toLowerCase(); chosen.place = 0; list(); } });
const count = el("p", { class: "quiet", role: "status" });
const items = el("ul", { class: "responses" });
const detail = el("div", { class: "detail" });
fill(byId("view-answers"), [el("div", { class: "trajectories" },
  el("aside", { class: "card" }, el("div", { class: "controls" }, setLabel, modelLabel, verdictLabel, el("label", {}, "search", search)), count, items),
  detail)]);

let shown = [];
const list = () => {
  const set = found.sets[chosen.set], model = found.models[chosen.model];
  const keep = VERDICTS[chosen.verdict];
  shown = set.questions.flatMap((question) => (question.answers[model] ?? [])
    .filter((x) => keep(x) && `${question.id} ${question.text} ${x.response}`.toLowerCase().includes(chosen.text))
    .map((answer) => ({ question, answer })));
  count.textContent = `${shown.length} answers; ${set.questions.length} of ${set.total} questions are on this page`;
  items.replaceChildren(...shown.map(({ question, answer }, place) => el("li", {}, el("button", { type: "button", class: "item", onclick: () => { chosen.place = place; open(); } },
    el("span", { class: `mark ${answer.correct ? "right" : "wrong"}`, text: answer.correct ? "✓" : "✗" }),
    el("span", { class: "item-numbers", text: visible(`${question.id}: ${answer.answer ?? "no answer"} (${question.expected})`) }),
    el("span", { class: "item-text", text: visible(beginning(question.text, 80)) })))));
  open();
};

const chip = (answer) => el("span", { class: `chip ${answer.correct ? "right" : "wrong"}`, text: answer.correct ? "right" : "wrong" });

const drawAnswer = (model, answer) => el("article", { class: "card response" },
  el("header", {}, el("h3", { text: visible(model) }), chip(answer),
    el("span", { text: visible(answer.answer === null ? "no answer found" : `answer: ${answer.answer}`) }),
    el("span", { class: "reason", text: visible(`${answer.reason}; ${answer.tokens} tokens${answer.truncated ? ", truncated" : ""}${answer.judged ? ", answer found by the judge" : ""}`) })),
  el("pre", { text: visible(answer.response) }));

const open = () => {
  [...items.children].forEach((x, place) => {
    if (place === chosen.place) { x.firstChild.setAttribute("aria-current", "true"); reveal(x, items); } else x.firstChild.removeAttribute("aria-current");
  });
  const now = shown[chosen.place];
  if (!now) { detail.replaceChildren(el("p", { class: "card quiet", text: "No answer matches." })); return; }
  const { question, answer } = now, model = found.models[chosen.model];
  const others = found.models.filter((x) => x !== model && question.answers[x]);
  detail.replaceChildren(
    el("div", { class: "card" }, el("h2", { text: visible(question.id) }),
      el("div", { class: "content full" }, question.images.map((name) => (pictures[name]
        ? el("img", { src: pictures[name], alt: `image of question ${question.id}` })
        : el("p", { class: "quiet", text: "The image is not on this page: size limit." }))), visible(question.text)),
      el("p", {}, "expected: ", el("strong", { text: visible(question.expected) }))),
    drawAnswer(model, answer),
    ...others.flatMap((x) => question.answers[x].slice(0, 1).map((y) => drawAnswer(x, y))));
};

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
  const step = { j: 1, k: -1 }[event.key];
  if (step) { chosen.place = clamp(chosen.place + step, 0, Math.max(0, shown.length - 1)); open(); }
});
byId("theme").addEventListener("click", () => { document.documentElement.dataset.theme = isDark() ? "light" : "dark"; });
if (found.sets.length) list();
view();
