// The page's frame: which room is open, the colours, and what the server says of itself.
import { holdSteps } from "./parts/background.js";
import { h, loadStyle, replace } from "./parts/dom.js";
import "./parts/server-state.js";
import { keepHistory } from "./rooms/metrics/history.js";

const ROOMS = [
  ["chat", "Chat"],
  ["scheduler", "Scheduler"],
  ["compare", "Compare"],
  ["metrics", "Metrics"],
];
const THEMES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

const main = document.getElementById("main");
const nav = document.getElementById("rooms");
const links = new Map(ROOMS.map(([name, title]) => [name, h("a", { href: `#/${name}` }, title)]));
nav.append(...links.values());

/** The room that the address names, and what follows its "?". */
export function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { room: links.has(path) ? path : "chat", query: new URLSearchParams(query) };
}

let open = "";

async function show() {
  if (location.hash && !location.hash.startsWith("#/")) return; // a link within a room
  const { room } = place();
  if (room === open) return;
  open = room;
  for (const [name, link] of links) {
    if (name === room) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${links.get(room).textContent} · Penstock`;
  try {
    await Promise.all([import(`./rooms/${room}/${room}-room.js`), loadStyle(`ui/rooms/${room}/${room}.css`)]);
    if (room === open) replace(main, h("h1", { class: "visually-hidden" }, links.get(room).textContent), h(`${room}-room`));
  } catch (error) {
    replace(main, h("p", { class: "notice error", role: "alert" }, `This room could not be loaded: ${error.message}`));
    open = "";
  }
}

const button = document.getElementById("theme");

function paint(theme) {
  const [sign, words] = THEMES[theme];
  document.documentElement.dataset.theme = theme;
  button.textContent = sign;
  button.setAttribute("aria-label", `Colours: ${words}`);
  button.title = `Colours: ${words}`;
}

button.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length];
  localStorage.setItem("theme", next);
  paint(next);
});

const kept = localStorage.getItem("theme");
paint(kept in THEMES ? kept : "auto");
addEventListener("hashchange", show);
holdSteps();
keepHistory();
await show();
