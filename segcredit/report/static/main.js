// Views, keys and theme; for a run in progress, new numbers every few seconds.

const fileName = ({ run, kind, step }) => `${run}-${kind}-${step}`;
const loaded = new Map();
const asked = async (name) => {
  try { return await (await fetch(`rows/${name}`)).json(); } catch { return { error: "The server does not respond." }; }
};
const load = async (file) => {
  const name = fileName(file);
  if (!loaded.has(name)) loaded.set(name, data.live ? asked(name) : ready.then(() => embedded(`rows-${name}`)));
  const found = await loaded.get(name);
  if (found.error) loaded.delete(name); // request it again next time
  Object.assign(images, found.images ?? {});
  Object.assign(file, found.listed ?? {});
  return { rows: [], texts: [], ...found };
};
const ready = new Promise((resolve) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve);
  else resolve();
});

let data = embedded("overview");
const images = {};
const VIEWS = ["overview", "trajectories", "partitions", "analyses", "benchmarks"];
const drawn = new Set();

const open = async () => {
  const found = address.read();
  const view = VIEWS.includes(found.view) ? found.view : "overview";
  byId("main").setAttribute("aria-busy", "true");
  for (const name of VIEWS) byId(`view-${name}`).hidden = name !== view;
  for (const link of document.querySelectorAll("nav a")) link.setAttribute("aria-current", link.dataset.view === view ? "page" : "false");
  try {
    if (view === "overview" && !drawn.has(view)) overviewView.draw(data);
    if (view === "trajectories") await trajectoriesView.draw(data, found.settings);
    if (view === "benchmarks") await benchmarksView.draw();
    if (view === "partitions") await partitionsView.draw(data, found.settings);
    drawn.add(view);
  } finally { byId("main").setAttribute("aria-busy", "false"); }
};

const setTheme = (theme) => {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("segcredit-theme", theme); } catch { /* a page opened from a file may have no storage */ }
  again();
};
const again = () => { drawn.delete("overview"); return open(); }; // in the other colors
try { const theme = localStorage.getItem("segcredit-theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* as above */ }

byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
byId("help").addEventListener("click", () => byId("keys").showModal());
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
let onScreen = null; // print in the light theme
addEventListener("beforeprint", () => { onScreen ??= document.documentElement.dataset.theme ?? ""; document.documentElement.dataset.theme = "light"; again(); });
addEventListener("afterprint", () => { if (onScreen) document.documentElement.dataset.theme = onScreen; else delete document.documentElement.dataset.theme; onScreen = null; again(); });
addEventListener("hashchange", open);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || byId("keys").open) {
    if (event.key === "Escape") event.target.blur?.();
    return;
  }
  const view = address.read().view;
  let used = true;
  if (event.key === "?") byId("keys").showModal();
  else if (event.key === "t") setTheme(isDark() ? "light" : "dark");
  else if (view === "trajectories") used = trajectoriesView.key(event);
  else if (view === "partitions") used = partitionsView.key(event);
  else if (view === "benchmarks") used = benchmarksView.key(event);
  else used = false;
  if (used) event.preventDefault();
});
if (!byId("view-analyses").children.length) {
  byId("view-analyses").append(el("p", { class: "card", text: data.live ? "Analyses are only in a written report: segcredit report RUN." : "This page was written without analyses. Draw them: segcredit report RUN." }));
}
document.querySelector('[data-view="benchmarks"]').hidden = !benchmarksView.found.sets.length;
ready.then(() => Object.assign(images, embedded("images") ?? {}));
open();

if (data.live) {
  const status = byId("live");
  status.hidden = false;
  let seen = "";
  const follow = async () => {
    let answer, text;
    try {
      answer = await fetch("overview.json");
      text = await answer.text();
    } catch { status.textContent = "the server has stopped; these are the last numbers"; return; }
    if (!answer.ok) { status.textContent = `waiting: ${visible(beginning(JSON.parse(text).error, 160))}`; return; }
    status.textContent = `following · ${new Date().toLocaleTimeString()}`;
    if (text === seen || document.activeElement?.id === "more") return; // keep an open list open
    seen = text;
    const known = new Map(data.files.map((file) => [fileName(file), file]));
    data = JSON.parse(text);
    data.files = data.files.map((file) => known.get(fileName(file)) ?? file);
    for (const view of [overviewView, trajectoriesView, partitionsView]) view.data = data;
    drawn.delete("overview");
    if (address.read().view === "overview" || (!known.size && data.files.length)) await open();
    if (data.files.length !== known.size) for (const [id, view] of [["choose-file", trajectoriesView], ["cut-file", partitionsView]]) {
      byId(id)?.replaceChildren(...data.files.map((file) => el("option", { value: fileName(file), text: trajectoriesView.fileLabel(file), selected: fileName(file) === view.state.file })));
    }
  };
  const poll = async () => { try { await follow(); } finally { setTimeout(poll, 3000); } };
  poll();
}
