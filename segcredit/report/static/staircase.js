// A chart of V(s_m) as a staircase over the response, each step colored by its advantage; H below.

const staircase = (row, scales, narrow, onPoint) => {
  const count = row.pieces.length, W = innerWidth < 700 ? 440 : narrow ? 520 : 900, H = row.value ? 210 : 104, left = 50, right = 14, top = 12, middle = H - 82, bottom = 22;
  const X = (t) => left + (t / Math.max(count, 1)) * (W - left - right);
  const chart = svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "staircase", role: "img" });
  const segments = segmentsOf(row);
  const said = [];
  if (row.value) {
    const [low, high] = scales.axis ?? extent([...row.value, row.reward, 0]);
    const pad = (high - low) * 0.08 || 0.1;
    const Y = (v) => middle - 8 - ((v - low + pad) / (high - low + 2 * pad)) * (middle - 8 - top);
    for (const v of ticks(low - pad, high + pad, 3)) chart.append(
      svg("line", { x1: left, x2: W - right, y1: Y(v), y2: Y(v), class: "grid" }),
      svg("text", { x: left - 6, y: Y(v) + 4, "text-anchor": "end", text: tickLabel(v) }));
    chart.append(svg("text", { x: 4, y: top + 2, class: "unit", text: "V(s)" }));
    const stairs = segments.length ? segments : row.value.map((_, t) => ({ first: t, last: t }));
    let walked = "";
    for (const { first, last } of stairs) {
      const v = row.value[first];
      if (!isNumber(v)) continue;
      const credit = row.advantage?.[first];
      if (isNumber(credit)) {
        const share = credit / scales.advantage.high;
        const y = Math.min(Y(v), Y(low - pad));
        chart.append(svg("rect", { x: X(first), width: Math.max(X(last + 1) - X(first), 0.5), y, height: Math.abs(Y(low - pad) - Y(v)), fill: css(diverging(share)), class: "stair" }));
      }
      walked += `${walked ? "L" : "M"}${X(first).toFixed(1)} ${Y(v).toFixed(1)}H${X(last + 1).toFixed(1)}`;
    }
    if (stairs.length < count) chart.append(svg("path", { d: path(row.value.map((v, t) => [X(t), isNumber(v) ? Y(v) : NaN])), class: "thin" }));
    chart.append(svg("path", { d: walked, class: "walk" }));
    if (isNumber(row.reward)) chart.append(
      svg("circle", { cx: X(count), cy: Y(row.reward), r: 4.5, class: "reward" }),
      svg("text", { x: X(count) - 8, y: Y(row.reward) < middle / 2 ? Y(row.reward) + 16 : Y(row.reward) - 8, "text-anchor": "end", class: "unit halo", text: "reward" }));
    said.push("value before each segment as a staircase, colored by advantage");
  }
  if (row.entropy) {
    const most = scales.entropy.high, base = H - bottom;
    const Y = (h) => base - (h / most) * (base - middle - 6);
    chart.append(svg("line", { x1: left, x2: W - right, y1: base, y2: base, class: "axis" }),
      svg("text", { x: left - 6, y: Y(most) + 9, "text-anchor": "end", text: `H ${tickLabel(Number(most.toPrecision(2)))}` }));
    const width = Math.max(X(1) - X(0) - 1, 0.6); // one path for all bars, because there can be ten thousand
    const bars = row.entropy.map((h, t) => (isNumber(h) ? `M${(X(t) + 0.5).toFixed(2)} ${base}V${Math.min(Y(h), base).toFixed(1)}h${width.toFixed(2)}V${base}Z` : ""));
    chart.append(svg("path", { d: bars.join(""), class: "hesitation" }));
    said.push("entropy of each token as bars");
  }
  if (segments.length < (W - left - right) / 6) chart.append(svg("path", { d: segments.slice(0, -1).map(({ last }) => `M${X(last + 1).toFixed(1)} ${top}V${H - bottom}`).join(""), class: "boundary" })); // more marks would cover the lines
  for (const t of ticks(0, count, 8)) if (Number.isInteger(t)) chart.append(svg("text", { x: X(t), y: H - 6, "text-anchor": "middle", text: String(t) }));
  const cross = svg("rect", { y: top, height: H - bottom - top, width: Math.max(X(1) - X(0), 2), class: "cursor", visibility: "hidden" });
  chart.append(cross);
  chart.setAttribute("aria-label", said.join("; ") || "no values and no entropies were recorded");
  const at = (event) => {
    const box = chart.getBoundingClientRect();
    const t = Math.floor(((event.clientX - box.left) / box.width * W - left) / (W - left - right) * count);
    if (t >= 0 && t < count) onPoint(t, event.type === "pointerdown");
  };
  chart.addEventListener("pointermove", at);
  chart.addEventListener("pointerdown", at);
  chart.show = (t) => set(cross, t === null ? { visibility: "hidden" } : { x: X(t), visibility: "visible" });
  return row.value || row.entropy ? chart : null;
};
