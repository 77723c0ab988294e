// Results before and after training, the curves of all runs, and what ran.

const CHARTS = [
  { title: "Held-out accuracy", unit: "correct answers", marks: true, share: true, lines: [["evaluation", "sampled", "sampled"], ["evaluation", "greedy", "greedy", "5 4"]], like: "accuracy" },
  { title: "Held-out reward", unit: "mean", marks: true, lines: [["evaluation", "reward", "sampled"], ["evaluation", "greedy_reward", "greedy", "5 4"]], unlessSame: [["evaluation", "sampled"], ["evaluation", "greedy"]] },
  { title: "Training reward", unit: "mean", lines: [["optimize", "reward", "reward"]] },
  { title: "Responses without a verdict", unit: "of responses", share: true, unlessZero: true, lines: [["optimize", "no_verdict", "training"], ["evaluation", "no_verdict", "held out", "5 4"]] },
  { title: "Entropy", unit: "nats per token", lines: [["optimize", "entropy", "entropy"]] },
  { title: "Response length", unit: "tokens", lines: [["optimize", "response_length", "mean"]] },
  { title: "KL to the reference", unit: "nats per token", lines: [["optimize", "kl", "KL"]] },
  { title: "Clip fraction", unit: "of tokens", share: true, lines: [["optimize", "clip_fraction", "clipped"]] },
  { title: "Value loss", unit: "", lines: [["optimize", "value_loss", "reinforcement"], ["pretrain_critic", "value_loss", "critic training", "5 4"]] },
  { title: "Explained variance of the reward", unit: "1 is a perfect critic", lines: [["optimize", "explained_variance", "reinforcement"], ["pretrain_critic", "explained_variance", "critic training", "5 4"]] },
  { title: "Segments per response", unit: "", unless: [1, "a segment is the whole response"], lines: [["optimize", "segments", "segments"]] },
  { title: "Segment length", unit: "tokens", unless: [1, "a segment is one token"], lines: [["optimize", "segment_length", "tokens"]] },
  { title: "Advantage", unit: "standard deviation over tokens", lines: [["optimize", "advantage_std", "deviation"]] },
  { title: "Gradient norm", unit: "before clipping", lines: [["optimize", "policy/grad_norm", "policy"], ["optimize", "critic/grad_norm", "critic", "5 4"]] },
  { title: "Imitation", unit: "−log π per token, in nats", lines: [["warm_start", "nll", "warm start"]] },
];
const PHASES = ["sample", "score", "annotate", "credit", "update", "sync"];

const curve = (run, stage, key) => (Object.hasOwn(run.curves, stage) && Object.hasOwn(run.curves[stage], key) ? run.curves[stage][key] : undefined);
const chartOf = (name) => { // "stage metric"
  const place = name.indexOf(" "), stage = name.slice(0, place), key = name.slice(place + 1);
  return { title: visible(beginning(`${stage}: ${key}`, 200)), unit: "", lines: [[stage, key, visible(beginning(key, 80))]] };
};

const overviewView = {
  smooth: 0.6,
  grouped: true,
  also: [], // "stage metric", chosen by the reader
  opening: el("div", {}), // the pair; it stays while it is drawn again

  draw(data) {
    this.data = data;
    const view = byId("view-overview");
    const opened = [...view.querySelectorAll("details")].map((x) => x.open); // redrawn while a run is in progress
    const focused = view.contains(document.activeElement) ? document.activeElement.id : "";
    const charts = el("div", { class: "charts" }), also = el("div", { class: "charts" });
    const redraw = () => {
      charts.replaceChildren(...this.charts(CHARTS));
      also.replaceChildren(...this.charts(this.also.map(chartOf)));
    };
    const several = new Set(data.runs.map((run) => run.group)).size < data.runs.length;
    const controls = el("div", { class: "controls" },
      el("label", {}, "Smoothing ", el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: this.smooth, id: "smooth", oninput: (event) => { this.smooth = Number(event.target.value); redraw(); } })),
      several ? el("label", {}, el("input", { type: "checkbox", id: "grouped", checked: this.grouped, onchange: (event) => { this.grouped = event.target.checked; this.draw(this.data); } }), " average over seeds (mean and 95 % t-interval)") : null,
      data.runs.length > 1 ? this.legend() : null);
    const cards = data.runs.map((run, i) => this.card(run, i));
    const curves = [el("div", { class: "curves-title" }, el("h2", { text: "Curves" }), controls), charts, this.phases(), this.more(also, redraw)];
    const one = data.runs.length === 1;
    view.replaceChildren(...[ // results first, each run's facts last
      one ? landing.headline(data.runs[0]) : this.comparison(),
      one ? this.warnings(data.runs[0]) : null,
      one ? this.opening : null,
      ...curves, this.glossary(), el("h2", { text: one ? "Run" : "Runs" }), ...cards].filter(Boolean));
    redraw();
    if (one) landing.draw(data, this.opening);
    view.querySelectorAll("details").forEach((x, i) => { x.open = opened[i] ?? false; });
    if (focused) byId(focused)?.focus();
  },

  glossary() {
    return el("details", { class: "card glossary" }, el("summary", { text: `Symbols: ${this.data.glossary.map(([term]) => term).join(", ")}` }),
      el("dl", { class: "facts" }, this.data.glossary.map(([term, meaning]) => [el("dt", { text: term }), el("dd", { text: meaning })])));
  },

  // one row per run: each measurement after training, and its change
  comparison() {
    const labels = [...new Set(this.data.runs.flatMap((run) => run.results.map((row) => row.label)))];
    if (!labels.length) return "";
    const cell = (row) => {
      if (!row) return el("td", { text: "–" });
      const [old, now, difference] = row.texts;
      return el("td", {}, isNumber(row.after[0]) ? [now, " ", el("span", { class: "interval", text: `(${difference}${row.noise ? ", within noise" : ""})` })] : [old, " ", el("span", { class: "interval", text: "(only before)" })]);
    };
    return el("article", { class: "card comparison" }, el("h2", { text: "Comparison" }),
      el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Comparison of the runs" }, el("table", { class: "results" },
        el("thead", {}, el("tr", {}, ["after training (change)", ...labels].map((x) => el("th", { scope: "col", text: x })))),
        el("tbody", {}, this.data.runs.map((run, i) => el("tr", {},
          el("th", { scope: "row" }, el("span", { class: "swatch", style: { background: this.color(i) } }), visible(run.name)),
          labels.map((label) => cell(run.results.find((row) => row.label === label)))))))));
  },

  legend() {
    return el("ul", { class: "legend", "aria-label": "Runs" }, this.data.runs.map((run, i) =>
      el("li", {}, el("span", { class: "swatch", style: { background: this.color(i) } }), visible(run.name))));
  },

  color(i) {
    if (!this.grouped) return RUN_COLORS[i % RUN_COLORS.length];
    const groups = [...new Set(this.data.runs.map((run) => run.group))];
    return RUN_COLORS[groups.indexOf(this.data.runs[i].group) % RUN_COLORS.length];
  },

  card(run, i) {
    const result = run.results.length ? el("div", { class: "wide" }, el("table", { class: "results" },
      el("thead", {}, el("tr", {}, [`${run.prompts ?? ""} held-out prompts`.trim(), "before", "after", "change"].map((x) => el("th", { scope: "col", text: x })))),
      el("tbody", {}, run.results.map((row) => this.resultRow(row))))) : el("p", { class: "quiet", text: "No evaluation was recorded." });
    return el("article", { class: "card run" },
      el("h2", {}, this.data.runs.length > 1 ? el("span", { class: "swatch", style: { background: this.color(i) } }) : null, visible(run.name)),
      el("div", { class: "columns" },
        el("div", {}, result,
          this.data.runs.length > 1 ? this.warnings(run) : null,
          el("details", {}, el("summary", { text: "Parts of the method" }), el("dl", { class: "facts parts" }, run.method.map(([name, part]) => [el("dt", { text: name }), el("dd", {}, el("code", { text: visible(part) }))]))),
          el("details", {}, el("summary", { text: "Full configuration" }), el("pre", { text: visible(run.config) }))),
        el("dl", { class: "facts" }, run.facts.map(([label, fact]) => [el("dt", { text: label }), el("dd", { text: visible(fact) })]))));
  },

  warnings(run) {
    return run.warnings.length ? el("ul", { class: "warnings", "aria-label": "Warnings" }, run.warnings.map(([step, message]) => {
      const label = stepLabel(run, step);
      return el("li", {}, el("strong", { text: `${label[0].toUpperCase()}${label.slice(1)}: ` }), visible(message));
    })) : null;
  },

  resultRow(row) {
    const { label, before, after, share, texts } = row;
    const interval = ([, low, high]) => (share && isNumber(low) && isNumber(high) ? [" ", el("span", { class: "interval", text: `(${(100 * low).toFixed(1)}–${(100 * high).toFixed(1)})` })] : []);
    const [old, now, difference] = texts;
    return el("tr", {}, el("th", { scope: "row", text: label }), el("td", {}, old, interval(before)), el("td", {}, now, interval(after)), el("td", { text: difference + noise(row) }));
  },

  healthy(lines, like) {
    const { metrics, otherwise } = this.data.healthy;
    const known = [like, ...lines.map(([, key]) => key)].find((key) => Object.hasOwn(metrics, key));
    return known ? `healthy: ${metrics[known].replaceAll("`", "")}` : otherwise;
  },

  lines(parts) {
    return this.data.runs.flatMap((run, i) => parts.flatMap(([stage, key, label, dash]) => {
      const found = curve(run, stage, key);
      if (!found || !found[1].some(isNumber)) return [];
      const bounds = ["low", "high"].map((end) => curve(run, stage, `${key}_${end}`)?.[1]);
      const named = this.data.runs.length > 1 ? `${visible(run.name)}${parts.length > 1 ? `, ${label}` : ""}` : label;
      const second = this.data.runs.length === 1 && dash;
      return [{ label: named, color: second ? RUN_COLORS[1] : this.color(i), dash, steps: found[0].map((step) => step - originOf(run)), values: found[1], texts: run.texts[stage]?.[key], low: bounds[1] && bounds[0], high: bounds[0] && bounds[1], group: `${run.group}|${key}|${stage}` }];
    }));
  },

  charts(wanted) {
    const spans = spansOf(this.data.runs);
    return wanted.map(({ title, unit, marks, share, unlessZero, unless, unlessSame, lines, like }) => {
      const found = this.lines(lines);
      const all = (x) => found.every((line) => line.values.every((value) => value === x || !isNumber(value)));
      if (unlessSame && found.length && JSON.stringify(found.map((line) => line.values)) === JSON.stringify(this.lines(unlessSame).map((line) => line.values))) return null; // a reward of 0 or 1
      if (!found.length || (unlessZero && all(0)) || (unless && all(unless[0]))) return null;
      const chart = lineChart({ title, unit, marks, share, smooth: this.smooth, spans, lines: this.grouped ? together(found) : found });
      chart.append(el("p", { class: "healthy", text: this.healthy(lines, like) }));
      if (this.data.runs.length === 1 && found.length > 1) chart.append(el("ul", { class: "legend" }, found.map((line) => el("li", {}, el("span", { class: "swatch", style: { background: line.color } }), line.label))));
      const kinds = lines.filter((part) => this.lines([part]).length);
      if (this.data.runs.length > 1 && kinds.length > 1) chart.append(el("ul", { class: "legend" }, kinds.map(([, , label, dash]) => el("li", { text: `${dash ? "╌╌" : "──"} ${label}` }))));
      return chart;
    }).filter(Boolean);
  },

  phases() {
    const rows = this.data.runs.map((run) => {
      const found = PHASES.map((phase) => {
        const values = (curve(run, "optimize", `time/${phase}`)?.[1] ?? []).filter(isNumber).sort((a, b) => a - b);
        return values.length ? values[Math.floor(values.length / 2)] : 0;
      });
      return { name: run.name, found, total: found.reduce((a, b) => a + b, 0) };
    }).filter((row) => row.total > 0);
    if (!rows.length) return "";
    const longest = Math.max(...rows.map((row) => row.total));
    return el("figure", { class: "card phases" }, el("figcaption", {}, el("h3", { text: "Time per phase" }), el("span", { class: "unit", text: "median seconds per optimization step" })),
      rows.map((row) => el("div", { class: "phase-row" }, el("span", { class: "phase-name", text: `${visible(row.name)}: ${number(Number(row.total.toPrecision(3)))} s` }),
        el("div", { class: "bar" }, row.found.map((x, i) => x ? el("span", { class: "piece", title: `${PHASES[i]} ${number(Number(x.toPrecision(3)))} s`, style: { width: `${100 * x / longest}%`, background: RUN_COLORS[i] } }) : null)))),
      el("ul", { class: "legend" }, PHASES.map((phase, i) => el("li", {}, el("span", { class: "swatch", style: { background: RUN_COLORS[i] } }), phase))));
  },

  more(place, redraw) {
    const shown = new Set(CHARTS.flatMap((chart) => chart.lines.map(([stage, key]) => `${stage} ${key}`)));
    const names = new Set(this.data.runs.flatMap((run) => Object.entries(run.curves).flatMap(([stage, found]) => Object.keys(found).map((key) => `${stage} ${key}`))));
    const others = [...names].filter((name) => !shown.has(name) && !/_(low|high)$/.test(name)).sort();
    const select = el("select", { id: "more", onchange: (event) => {
      const name = others[Number(event.target.value)];
      this.also = [name, ...this.also.filter((x) => x !== name)];
      redraw();
      event.target.value = "";
    } }, el("option", { value: "", text: "another metric…" }), others.map((name, i) => el("option", { value: i, text: visible(beginning(name, 80)) })));
    return el("div", { class: "more" }, el("label", {}, "Also draw ", select), place);
  },
};
