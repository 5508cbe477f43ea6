// Tables of texts, and of elements that make texts shorter.
import { h } from "./dom.js";

/** Fill a table; a row's first cell is its head. `onPick` gets the place of a row whose button is pressed. */
export function fillTable(table, heads, rows, onPick) {
  const head = (cell, place) => {
    if (!onPick) return h("th", { scope: "row" }, cell);
    return h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: () => onPick(place) }, cell));
  };
  table.replaceChildren(
    h("thead", {}, h("tr", {}, heads.map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", {}, rows.map((cells, place) => h("tr", {}, cells.map((cell, column) => {
      const shown = cell instanceof Node ? cell : String(cell);
      return column ? h("td", {}, shown) : head(shown, place);
    })))),
  );
}
