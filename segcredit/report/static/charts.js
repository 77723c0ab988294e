// Line charts as SVG: several runs or seeds, smoothed, with intervals and a crosshair.

const T_975 = [0, 12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];
const tQuantile = (freedom) => T_975[freedom] ?? 1.96 + 2.5 / freedom;

const smoothed = (values, weight) => {
  let last = 0, norm = 0;
  return values.map((x) => {
    if (!isNumber(x)) return x;
    last = weight * last + (1 - weight) * x;
    norm = weight * norm + (1 - weight);
    return last / norm;
  });
};

const ticks = (low, high, count) => {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough);
  const first = Math.ceil(low / step) * step;
  // counted, because adding a small step to a huge number has no effect
  const more = clamp(Math.floor((high - first) / step + 1e-9), -1, 2 * count);
  if (!Number.isFinite(first + more)) return [];
  return [...new Set(Array.from({ length: more + 1 }, (_, i) => first + i * step))].map((x) => Math.abs(x) < step * 1e-6 ? 0 : x);
};
const tickLabel = (x) => {
  const size = Math.abs(x);
  const text = size >= 1e5 || (size < 1e-3 && x !== 0) ? x.toExponential(0) : String(Number(x.toPrecision(4)));
  return text.replace("-", "−");
};

// Larger numbers become gaps in the curve: their squares and differences would overflow.
const bounded = (values) => values.map((x) => isNumber(x) && Math.abs(x) > 1e150 ? (x > 0 ? "∞" : "−∞") : x);

// Runs that differ only in their seed become one line with a 95 % t-interval of the mean.
const together = (all) => {
  const lines = all.map((line) => ({ ...line, values: bounded(line.values) }));
  const groups = new Map();
  for (const line of lines) groups.set(line.group, [...(groups.get(line.group) ?? []), line]);
  return [...groups.values()].map((some) => {
    if (some.length === 1) return some[0];
    const at = new Map();
    for (const line of some) line.steps.forEach((step, i) => {
      if (isNumber(line.values[i])) at.set(step, [...(at.get(step) ?? []), line.values[i]]);
    });
    const steps = [...at.keys()].sort((a, b) => a - b);
    const values = [], low = [], high = [];
    for (const step of steps) {
      const found = at.get(step), n = found.length;
      const mean = found.reduce((a, b) => a + b, 0) / n;
      const deviation = n > 1 ? Math.sqrt(found.reduce((a, b) => a + (b - mean) ** 2, 0) / (n - 1)) : 0;
      const half = n > 1 ? tQuantile(n - 1) * deviation / Math.sqrt(n) : 0;
      values.push(mean); low.push(mean - half); high.push(mean + half);
    }
    return { ...some[0], label: `${some[0].label} (${some.length} seeds)`, steps, values, low, high, texts: undefined };
  });
};

const path = (points) => {
  let text = "", open = false;
  for (const [x, y] of points) {
    if (!isNumber(y) || !Number.isFinite(y)) { open = false; continue; }
    text += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
  }
  return text;
};

// The steps of each stage are numbered from 1, as in the progress bar. A chart has one span per stage:
// {name, start, end} on its axis, where start is the step before the first one.
const spanAt = (spans, x) => spans.findLast((span) => x > span.start) ?? spans[0];
const stepTicks = (spans, x0, x1, width) => {
  const parts = spans.filter((span) => span.end > x0 && span.start < x1 || span.start === x0);
  if (!parts.length) return ticks(x0, x1, 5).map((x) => ({ x, text: tickLabel(x) }));
  const found = [];
  for (const { start, end } of parts) {
    const from = Math.max(x0, start), to = Math.min(x1, end);
    for (const x of ticks(from - start, to - start, Math.max(1, Math.round(5 * (to - from) / (x1 - x0 || 1))))) {
      const at = start + x;
      if ((x === 0 && from > x0) || !Number.isInteger(x) || found.some((other) => (at - other.x) * width < 26 * (x1 - x0))) continue;
      found.push({ x: at, text: tickLabel(x) });
    }
  }
  return found;
};

// lines: [{label, color, steps, values, texts?, low?, high?, group, dash?}]; share: values are fractions, in percent
const lineChart = ({ title, unit, lines, smooth, marks, share, spans = [] }) => {
  const W = 420, H = 226, left = 52, right = 12, top = 12, bottom = 36;
  lines = lines.map((line) => ({ ...line, values: bounded(line.values), low: line.low && bounded(line.low), high: line.high && bounded(line.high) }));
  const shown = lines.map((line) => ({ ...line, drawn: marks || line.steps.length < 16 ? line.values : smoothed(line.values, smooth) }));
  const [x0, x1] = extent(shown.flatMap((line) => line.steps));
  // scale to the lines; wide intervals (of two seeds) may exceed the chart
  let [y0, y1] = extent(shown.flatMap((line) => line.values));
  const reach = (y1 - y0) / 2 || Math.abs(y1) / 10 || 0.5;
  const [low, high] = extent(shown.flatMap((line) => [...(line.low ?? []), ...(line.high ?? [])]).concat(y0, y1));
  y0 = Math.max(low, y0 - reach);
  y1 = Math.min(high, y1 + reach);
  const pad = (y1 - y0) * 0.06 || Math.abs(y1) * 0.1 || 0.5;
  y0 -= pad; y1 += pad;
  const X = (x) => left + ((x - x0) / (x1 - x0 || 1)) * (W - left - right);
  const Y = (y) => H - bottom - clamp((y - y0) / (y1 - y0), 0, 1) * (H - top - bottom);
  const say = (line, i) => { // as in the terminal, where it shows the metric
    const x = line.values[i];
    if (!isNumber(x)) return number(x);
    return line.texts?.[i] ?? (share ? `${(100 * x).toFixed(1)} %` : number(Number(x.toPrecision(4))));
  };
  const chart = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}: ${shown.map((line) => `${line.label} ends at ${say(line, line.values.findLastIndex(isNumber))}`).join(", ")}` });
  for (const y of ticks(y0, y1, 4)) chart.append(
    svg("line", { x1: left, x2: W - right, y1: Y(y), y2: Y(y), class: "grid" }),
    svg("text", { x: left - 6, y: Y(y) + 4, "text-anchor": "end", text: share ? `${tickLabel(100 * y)} %` : tickLabel(y) }));
  for (const { x, text } of stepTicks(spans, x0, x1, W - left - right)) chart.append(svg("text", { x: X(x), y: H - 20, "text-anchor": "middle", text }));
  const crossed = spans.filter((span) => span.end > x0 && span.start < x1);
  for (const [i, { name, start, end }] of crossed.entries()) if (crossed.length > 1) fill(chart, [
    i ? svg("line", { x1: X(start), x2: X(start), y1: top, y2: H - bottom, class: "boundary" }) : null,
    X(Math.min(end, x1)) - X(Math.max(start, x0)) > 8 * name.length ? svg("text", { x: X(Math.max(start, x0)) + 3, y: top + 2, class: "unit", text: name }) : null]);
  chart.append(svg("line", { x1: left, x2: W - right, y1: H - bottom, y2: H - bottom, class: "axis" }),
    svg("text", { x: W - right, y: H - 5, "text-anchor": "end", class: "unit", text: crossed.length > 1 ? "step in the stage" : crossed.length && spans.length > 1 ? `${crossed[0].name}, step` : "step" }));
  for (const line of shown) {
    if (line.low) {
      const up = line.steps.map((step, i) => [X(step), isNumber(line.high[i]) ? Y(line.high[i]) : NaN]);
      const down = line.steps.map((step, i) => [X(step), isNumber(line.low[i]) ? Y(line.low[i]) : NaN]).reverse();
      chart.append(svg("path", { d: path([...up, ...down]) + "Z", fill: line.color, class: "band" }));
    }
    const points = (values) => line.steps.map((step, i) => [X(step), isNumber(values[i]) ? Y(values[i]) : NaN]);
    if (line.drawn !== line.values && smooth > 0) chart.append(svg("path", { d: path(points(line.values)), stroke: line.color, class: "raw" }));
    chart.append(svg("path", { d: path(points(line.drawn)), stroke: line.color, class: "line", "stroke-dasharray": line.dash }));
    if (marks || line.steps.length < 25) for (const [x, y] of points(line.drawn)) if (Number.isFinite(y)) chart.append(svg("circle", { cx: x, cy: y, r: 2.6, fill: line.color }));
  }
  const cross = svg("line", { y1: top, y2: H - bottom, class: "cross", visibility: "hidden" });
  chart.append(cross);
  const readout = el("p", { class: "readout", text: "\u00a0" });
  const steps = [...new Set(shown.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const point = (event) => {
    const box = chart.getBoundingClientRect();
    const at = x0 + ((event.clientX - box.left) / box.width * W - left) / (W - left - right) * (x1 - x0);
    const step = steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a), steps[0]);
    set(cross, { x1: X(step), x2: X(step), visibility: "visible" });
    const said = shown.map((line) => { const i = line.steps.indexOf(step); return i < 0 ? null : `${line.label} ${say(line, i)}`; });
    const span = spans.length ? spanAt(spans, step) : { start: 0 };
    readout.textContent = `${crossed.length > 1 ? `${span.name}, ` : ""}step ${step - span.start}: ${said.filter(Boolean).join(" · ")}`;
  };
  chart.addEventListener("pointermove", point);
  chart.addEventListener("pointerdown", point);
  chart.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); readout.textContent = "\u00a0"; });
  return el("figure", { class: "card chart", "data-title": title },
    el("figcaption", {}, el("h3", { text: title }), unit ? el("span", { class: "unit", text: unit }) : null), chart, readout);
};
