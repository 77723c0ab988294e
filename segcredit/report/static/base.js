// Small helpers. Text is always set through textContent, so nothing from a run is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

const set = (node, attributes) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "style") Object.assign(node.style, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  return node;
};
const fill = (node, children) => {
  // one by one, because a call cannot take the hundred thousand arguments of a very long response
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
};
const el = (tag, attributes = {}, ...children) => fill(set(document.createElement(tag), attributes), children);
const svg = (tag, attributes = {}, ...children) => fill(set(document.createElementNS(SVG, tag), attributes), children);
const byId = (id) => document.getElementById(id);
const embedded = (id) => {
  const node = byId(id);
  return node ? JSON.parse(node.textContent) : null;
};

const isNumber = (x) => typeof x === "number";
const noise = (row) => (row.noise ? " (within noise)" : ""); // the interval of the change contains 0
const number = (x) => {
  // as in the data: at most four significant digits, with a true minus sign
  if (x === null || x === undefined) return "–";
  if (!isNumber(x)) return String(x);
  const shown = Math.abs(x) >= 1e-3 || x === 0 ? String(x) : x.toExponential();
  return shown.replaceAll("-", "−");
};
const extent = (values) => {
  let low = Infinity, high = -Infinity;
  for (const x of values) {
    if (!isNumber(x)) continue;
    if (x < low) low = x;
    if (x > high) high = x;
  }
  return low <= high ? [low, high] : [0, 1];
};
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);

// Characters that are invisible or that reorder the text around them.
const HIDDEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|\udb40[\udc00-\udfff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;
const NAMES = { "\t": "⇥", "\r": "␍", "\u0000": "␀", "\u00ad": "·" };
const visible = (text) =>
  text.replace(HIDDEN, (x) => NAMES[x] ?? `⟨${x.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

// the first characters, without splitting a surrogate pair
const beginning = (text, count) => [...text.slice(0, 2 * count)].slice(0, count).join("");

// scroll a box, and nothing around it, until the inner element is visible
const reveal = (inner, box) => {
  const a = inner.getBoundingClientRect(), b = box.getBoundingClientRect();
  if (a.top < b.top) box.scrollTop -= b.top - a.top;
  else if (a.bottom > b.bottom) box.scrollTop += a.bottom - b.bottom;
};

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};

// The address stores the current view, so that a link opens the same view.
const address = {
  read() {
    const [view, rest = ""] = location.hash.slice(1).split("?");
    return { view: view || "overview", settings: Object.fromEntries(new URLSearchParams(rest)) };
  },
  write(view, settings) {
    const found = new URLSearchParams(settings).toString();
    try { history.replaceState(null, "", `#${view}${found ? `?${found}` : ""}`); } catch { /* browsers limit the rate, e.g. while a key is held down */ }
  },
};
