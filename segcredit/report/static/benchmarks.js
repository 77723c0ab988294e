// Scores and answers of the run's checkpoints on benchmarks.

const benchmarksView = {
  found: embedded("benchmarks"),
  answers: null,

  async draw() {
    if (this.answers || !this.found.sets.length) return;
    await ready; // the images follow the script
    const { found } = this;
    this.answers = answersView(found, embedded("benchmark-images"));
    const main = (set, model) => Object.values(ownScores(set, model))[0];
    const metric = (set) => found.models.flatMap((model) => Object.keys(ownScores(set, model)))[0] ?? "";
    byId("view-benchmarks").replaceChildren(
      el("div", { class: "card" }, el("h2", { text: "Scores" }), el("p", { class: "quiet", text: "Percent, with 95 % intervals over questions." }),
        scoreTable(found, "set", [
          ...found.sets.map((set) => [`${set.title}: ${metric(set)}`, found.models.map((model) => scoreCell(main(set, model)))]),
          ["sampled with", found.models.map((model) => el("td", { class: "quiet", text: visible(found.settings[model] ?? "–") }))]])),
      ...found.sets.map((set) => allScores(found, set)),
      el("h2", { text: "Answers" }),
      this.answers.node);
  },

  key(event) { return this.answers?.key(event) ?? false; },
};
