// A response as text: one element per token, the tokens of a segment in one group, marks between groups.

const END = "∎";

const segmentsOf = (row) => {
  // [{first, last, tokens}] by the recorded m(t); −1 (a hole) belongs to none
  const found = new Map();
  row.segment.forEach((m, t) => {
    if (m < 0) return;
    if (!found.has(m)) found.set(m, { number: m, tokens: [] });
    found.get(m).tokens.push(t);
  });
  return [...found.values()].map((x) => ({ ...x, first: x.tokens[0], last: x.tokens.at(-1) }));
};

const pieceText = (piece) => (piece === "" ? END : visible(piece).replaceAll("\n", "↵\n"));

// groups: [[token places…], …] in reading order
const groupsFrom = (ends, count) => {
  const groups = [];
  let first = 0;
  for (const end of ends) {
    groups.push(Array.from({ length: end - first + 1 }, (_, i) => first + i));
    first = end + 1;
  }
  if (first < count) groups.push(Array.from({ length: count - first }, (_, i) => first + i));
  return groups;
};
const groupsOfRow = (row) => {
  const groups = [];
  let before;
  row.pieces.forEach((_, t) => {
    const m = row.segment.length ? row.segment[t] : 0;
    if (t === 0 || m !== before) groups.push([]);
    groups.at(-1).push(t);
    before = m;
  });
  return groups;
};

const tokenText = (row, texts, groups, paint) => groups.map((places, i) => {
  const nodes = places.map((t, place) => {
    const shown = pieceText(texts[row.pieces[t]]);
    const breaks = shown.match(/\n*$/)[0]; // after the token, so that the mark of a segment stays on its line
    const token = el("bdi", { class: "token", "data-t": t, text: shown.slice(0, shown.length - breaks.length) });
    if (texts[row.pieces[t]] === "") token.classList.add("end");
    if (place === places.length - 1) token.classList.add("last");
    const color = paint?.(t);
    if (color) set(token, { style: { background: css(color), color: ink(color) } });
    return [token, breaks];
  });
  const after = nodes.at(-1).pop();
  return [el("span", { class: `segment${i % 2 ? " odd" : ""}`, "data-segment": i }, nodes), after];
});
