// The KV pool as a map: a square for each cell of pages, coloured by its state; who owns it, by hue.

import { h, shortId } from "../../parts/dom.js";
import { fillTable } from "../../parts/table.js";


const STATES = ["free", "cached", "shared", "held", "owned"];
const WORDS = { free: "free", cached: "prefix cache alone", shared: "several sequences", held: "held for a moment or swapped",
  owned: "one sequence" };

export class PagesPanel {
  constructor(onPick) {
    this.onPick = onPick;
    this.told = h("p", {}, "Not asked yet.");
    this.tiers = h("div", { class: "tiers" });
    this.table = h("table", {});
    this.element = h("section", { class: "panel pages", "aria-labelledby": "pages-title" },
      h("h3", { id: "pages-title" }, "KV pool"), this.told, this.tiers,
      h("details", {}, h("summary", {}, "As a table"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Pages in each state" }, this.table)));
  }

  show(map, colors) {
    this.tiers.replaceChildren(...map.tiers.map((tier) => this.tier(tier, map, colors)));
    const most = [...map.owners].sort((a, b) => b.pages - a.pages).slice(0, 20);
    fillTable(this.table, ["Pages", "State or owner", "Tier"], [
      ...map.tiers.flatMap((tier) => STATES.map((state) => [tier.counts[state] ?? 0, WORDS[state], tier.tier])),
      ...Object.entries(map.disk).map(([state, count]) => [count, state, "disk"]),
      ...most.map((owner) => [owner.pages, shortId(owner.key + (owner.index ? `/${owner.index}` : "")), "device"]),
    ]);
    const device = map.tiers[0];
    this.told.textContent = `${device.pages.toLocaleString("en")} pages of ${map.page_size} tokens: ` +
      STATES.filter((state) => device.counts[state]).map((state) => `${device.counts[state].toLocaleString("en")} ${WORDS[state]}`).join(", ") + ".";
  }

  tier(tier, map, colors) {
    const numCells = tier.runs.reduce((sum, run) => sum + run[3], 0);
    const canvas = h("canvas", { role: "img", "aria-label": `Pages of the ${tier.tier}; the table below says the same` });
    const width = Math.max(200, this.element.clientWidth - 32 || 300);
    const side = Math.max(2, Math.min(10, Math.floor(Math.sqrt((width * 160) / Math.max(1, numCells)))));
    const columns = Math.max(1, Math.floor(width / side));
    canvas.width = columns * side;
    canvas.height = Math.ceil(numCells / columns) * side;
    const context = canvas.getContext("2d"), owners = [];
    let place = 0;
    for (const [state, owner, group, length] of tier.runs) {
      context.fillStyle = state === "owned" ? `hsl(${(owner * 47) % 360} 60% ${group > 0 ? 65 : 50}%)` : colors[state];
      for (let cell = 0; cell < length; cell++, place++) {
        owners[place] = owner;
        context.fillRect((place % columns) * side, Math.floor(place / columns) * side, side - 1, side - 1);
      }
    }
    const ownerAt = (event) => {
      const box = canvas.getBoundingClientRect(), scale = canvas.width / Math.max(1, box.width);
      const column = Math.floor(((event.clientX - box.left) * scale) / side), row = Math.floor(((event.clientY - box.top) * scale) / side);
      return map.owners[owners[row * columns + column]];
    };
    canvas.addEventListener("pointermove", (event) => {
      const owner = ownerAt(event);
      canvas.title = owner ? `${owner.key}: ${owner.pages} pages` : "";
    });
    canvas.addEventListener("click", (event) => {
      const owner = ownerAt(event);
      if (owner) this.onPick(owner.key, owner.index);
    });
    const cells = tier.cell > 1 ? `, ${tier.cell} pages in a square` : "";
    return h("figure", {}, h("figcaption", {}, `${tier.tier}: ${tier.pages.toLocaleString("en")} pages${cells}`), canvas);
  }
}
