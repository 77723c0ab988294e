// Scores of benchmarks, and the questions with every model's response, extracted answer and verdict.

const percent = (x) => (isNumber(x) ? x.toFixed(2) : "–");
const scoreCell = (x) => el("td", {}, isNumber(x?.value) ? [percent(x.value), isNumber(x.low) && isNumber(x.high) ? [" ", el("span", { class: "interval", text: `(${x.low.toFixed(1)} – ${x.high.toFixed(1)}, n = ${x.count})` })] : null] : "–");
const ownScores = (set, model) => (Object.hasOwn(set.scores, model) ? set.scores[model] : {});

// found: {models, sets: [{title, total, questions, scores}]}
const scoreTable = (found, first, rows) => el("div", { class: "wide" }, el("table", { class: "results" },
  el("thead", {}, el("tr", {}, el("th", { scope: "col", text: first }), found.models.map((x) => el("th", { scope: "col", text: visible(x) })))),
  el("tbody", {}, rows.map(([name, cells]) => el("tr", {}, el("th", { scope: "row", text: visible(name) }), cells)))));

const allScores = (found, set) => {
  const metrics = [...new Set(found.models.flatMap((model) => Object.keys(ownScores(set, model))))];
  return el("details", { class: "card" },
    el("summary", { text: visible(`${set.title}: all metrics, with 95 % intervals`) }),
    scoreTable(found, "metric", metrics.map((name) => [name, found.models.map((model) => {
      const scores = ownScores(set, model);
      return scoreCell(Object.hasOwn(scores, name) ? scores[name] : null);
    })])));
};

const VERDICTS = {
  all: () => true,
  wrong: (x) => !x.correct,
  right: (x) => x.correct,
  "no answer": (x) => x.answer === null,
};

// pictures: name → data URI
const answersView = (found, pictures) => {
  const chosen = { set: 0, model: 0, verdict: "wrong", text: "", place: 0 };
  let shown = [];
  const given = (question, model) => (Object.hasOwn(question.answers, model) ? question.answers[model] : []);

  const picker = (label, names, change) => {
    const node = el("select", { onchange: () => { change(node.selectedIndex); chosen.place = 0; list(); } }, names.map((name, place) => el("option", { value: place, text: visible(name) })));
    return [node, el("label", {}, label, node)];
  };
  const [, setLabel] = picker("set", found.sets.map((x) => x.title), (x) => { chosen.set = x; });
  const [, modelLabel] = picker("model", found.models, (x) => { chosen.model = x; });
  const [verdictNode, verdictLabel] = picker("show", Object.keys(VERDICTS), (x) => { chosen.verdict = Object.keys(VERDICTS)[x]; });
  verdictNode.selectedIndex = 1;
  const search = el("input", { type: "search", placeholder: "text", oninput: () => { chosen.text = search.value.toLowerCase(); chosen.place = 0; list(); } });
  const count = el("p", { class: "quiet", role: "status" });
  const items = el("ul", { class: "responses" });
  const detail = el("div", { class: "detail" });

  const list = () => {
    const set = found.sets[chosen.set], model = found.models[chosen.model];
    const keep = VERDICTS[chosen.verdict];
    shown = set.questions.flatMap((question) => given(question, model)
      .filter((x) => keep(x) && `${question.id} ${question.text} ${x.response}`.toLowerCase().includes(chosen.text))
      .map((answer) => ({ question, answer })));
    count.textContent = `${shown.length} answers; ${set.questions.length} of ${set.total} questions are on this page`;
    items.replaceChildren(...shown.map(({ question, answer }, place) => el("li", {}, el("button", { type: "button", class: "item", onclick: () => { chosen.place = place; open(); } },
      el("span", { class: `mark ${answer.correct ? "right" : "wrong"}`, text: answer.correct ? "✓" : "✗" }),
      el("span", { class: "item-numbers", text: visible(`${question.id}: ${answer.answer ?? "no answer"} (${question.expected})`) }),
      el("bdi", { class: "item-text", text: visible(beginning(question.text, 80)) })))));
    open();
  };

  const drawAnswer = (model, answer) => el("article", { class: "card response" },
    el("header", {}, el("h3", { text: visible(model) }), el("span", { class: `chip ${answer.correct ? "right" : "wrong"}`, text: answer.correct ? "right" : "wrong" }),
      el("span", {}, el("bdi", { text: visible(answer.answer === null ? "no answer found" : `answer: ${answer.answer}`) })),
      el("bdi", { class: "reason", text: visible(`${answer.reason}; ${number(answer.tokens)} tokens${answer.truncated ? ", truncated" : ""}${answer.judged ? ", answer found by the judge" : ""}`) })),
    el("pre", { text: visible(answer.response) }));

  const open = () => {
    [...items.children].forEach((x, place) => {
      if (place === chosen.place) { x.firstChild.setAttribute("aria-current", "true"); reveal(x, items); } else x.firstChild.removeAttribute("aria-current");
    });
    const now = shown[chosen.place];
    if (!now) { detail.replaceChildren(el("p", { class: "card quiet", text: "No answer matches." })); return; }
    const { question, answer } = now, model = found.models[chosen.model];
    const others = found.models.filter((x) => x !== model && given(question, x).length);
    detail.replaceChildren(
      el("div", { class: "card" }, el("h2", { text: visible(question.id) }),
        el("div", { class: "content full" }, question.images.map((name) => (Object.hasOwn(pictures, name)
          ? el("img", { src: pictures[name], alt: `image of question ${visible(question.id)}` })
          : el("p", { class: "quiet", text: "The image is not on this page: size limit." }))), el("bdi", { text: visible(question.text) })),
        el("p", {}, "expected: ", el("strong", {}, el("bdi", { text: visible(question.expected) })))),
      drawAnswer(model, answer),
      ...others.flatMap((x) => given(question, x).slice(0, 1).map((y) => drawAnswer(x, y))));
  };

  list();
  return {
    node: el("div", { class: "trajectories answers" },
      el("aside", { class: "card" }, el("div", { class: "controls" }, setLabel, modelLabel, verdictLabel, el("label", {}, "search", search)), count, items),
      detail),
    key(event) {
      const step = { j: 1, k: -1 }[event.key];
      if (!step) return false;
      chosen.place = clamp(chosen.place + step, 0, Math.max(0, shown.length - 1));
      open();
      return true;
    },
  };
};
