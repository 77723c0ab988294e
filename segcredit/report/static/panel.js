// One response: the reward with its reason, the text colored by one number, the staircase chart, and
// the numbers of the token under the pointer.

const legendBar = (coloring, scale) => {
  const stops = Array.from({ length: 11 }, (_, i) => {
    const x = coloring.key === "ratio" ? Math.exp((i / 5 - 1) * scale.most) : scale.low + (scale.high - scale.low) * i / 10;
    return css(coloring.paint(coloring.share(x, scale)));
  });
  const shown = (x) => number(Number(x.toPrecision(3)));
  return el("div", { class: "scale", "aria-hidden": "true" }, el("span", { text: `${coloring.sign} ${shown(scale.low)}` }), el("span", { class: "ramp", style: { background: `linear-gradient(to right, ${stops.join(", ")})` } }), el("span", { text: `${shown(scale.high)}${coloring.unit ? ` ${coloring.unit}` : ""}` }), el("span", { class: "quiet", text: coloring.about }));
};

const promptNodes = (row, run) => {
  let used = 0;
  const picture = () => {
    const name = row.images[used++];
    const data = name && images[`${run}/${name}`];
    return data ? el("img", { src: data, alt: `image ${used} of the prompt` }) : el("span", { class: "quiet", text: "⟨image not on this page⟩" });
  };
  const messages = row.messages.map(([role, content]) => el("div", { class: "message" }, el("span", { class: "role", text: visible(role) }),
    el("div", { class: "content" }, content.split("<image>").flatMap((text, i) => [i ? picture() : null, text ? el("bdi", { text: visible(text) }) : null]))));
  return [...messages, el("p", { class: "quiet" }, el("bdi", { text: `prompt ${visible(row.id)}` }), row.answer === null ? null : el("bdi", { text: ` · reference answer ${visible(row.answer)}` }))];
};

const responsePanel = (row, texts, scales, color, label, narrow = false) => {
  const coloring = COLORINGS.find((x) => x.key === color && row[x.key]) ?? COLORINGS.find((x) => row[x.key]);
  const paint = (t) => { const x = coloring && row[coloring.key][t]; return isNumber(x) ? coloring.paint(coloring.share(x, scales[coloring.key])) : null; };
  const segments = segmentsOf(row);
  const text = el("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Response; arrow keys move from token to token" }, tokenText(row, texts, groupsOfRow(row), paint));
  const numbers = el("dl", { class: "numbers", "aria-live": "polite" });
  let pinned = null, pointed = null;

  const facts = (t) => {
    const segment = segments.find((x) => x.tokens.includes(t));
    const mean = (key) => { const found = segment.tokens.map((i) => row[key]?.[i]).filter(isNumber); return found.length ? Number((found.reduce((a, b) => a + b, 0) / found.length).toPrecision(4)) : null; };
    const piece = texts[row.pieces[t]];
    return [
      ["token", `${piece === "" ? "end of response" : `“${visible(piece).replaceAll("\n", "↵")}”`}${row.tokens[t] === undefined ? "" : ` (id ${row.tokens[t]})`}`],
      ["place", `${t + 1} of ${row.pieces.length}`],
      ...COLORINGS.filter((x) => row[x.key]).map((x) => [x.sign, `${number(row[x.key][t])}${x.unit === "nats" ? " nats" : ""}`, x.key]),
      ...(segment ? [
        ["segment", `${segment.number + 1} of ${segments.length}, ${segment.tokens.length} token${segment.tokens.length > 1 ? "s" : ""}`],
        ...(row.value ? [["V(s_m)", number(row.value[segment.first])]] : []),
        ...(row.entropy ? [["mean H", `${number(mean("entropy"))} nats`]] : []),
      ] : row.segment.length ? [["segment", "none: not written by the policy"]] : []),
    ];
  };
  const point = (place) => {
    const t = place in row.pieces ? place : null; // an empty response has no token
    pointed = t;
    for (const node of text.querySelectorAll(".pointed, .in-segment")) node.classList.remove("pointed", "in-segment");
    chart?.show(t);
    if (t === null) { numbers.replaceChildren(el("div", {}, el("dt", { class: "quiet", text: "Point at a token, or tap it, to see its numbers." }))); return; }
    const token = text.querySelector(`[data-t="${t}"]`);
    token?.classList.add("pointed");
    token?.parentElement.classList.add("in-segment");
    numbers.replaceChildren(...facts(t).map(([name, value, key]) => el("div", {}, el("dt", { text: name }), el("dd", { "data-number": key ?? name }, el("bdi", { text: value })))));
  };
  const chart = staircase(row, scales, narrow, (t, pin) => { if (pin) pinned = t; point(t); });
  text.addEventListener("pointerover", (event) => { const token = event.target.closest(".token"); if (token) point(Number(token.dataset.t)); });
  text.addEventListener("pointerdown", (event) => { const token = event.target.closest(".token"); pinned = token ? Number(token.dataset.t) : null; point(pinned); });
  for (const area of [text, chart]) area?.addEventListener("pointerleave", () => point(pinned));

  const node = el("article", { class: "card response" },
    el("header", {}, el("h3", { text: label }),
      el("span", { class: `chip ${grade(row)}`, "data-number": "reward", text: `reward ${number(row.reward)}` }),
      row.truncated ? el("span", { class: "chip wrong", text: "truncated at the length limit" }) : null,
      row.reason ? el("bdi", { class: "reason", text: visible(row.reason) }) : null),
    coloring ? legendBar(coloring, scales[coloring.key]) : el("p", { class: "quiet", text: "No numbers were recorded for these tokens." }),
    text, chart, numbers);
  point(null);
  return {
    node, row, point,
    pointed: () => pointed,
    reveal() { const token = text.querySelector(".pointed"); if (token) reveal(token, text); },
    moved(by, whole) {
      const last = row.pieces.length - 1;
      if (pointed === null) return by > 0 ? 0 : last;
      if (!whole || !segments.length) return clamp(pointed + by, 0, Math.max(last, 0));
      const firsts = segments.map((x) => x.first);
      const here = firsts.findLastIndex((first) => first <= pointed);
      pinned = firsts[clamp(here + by, 0, firsts.length - 1)];
      return pinned;
    },
  };
};
