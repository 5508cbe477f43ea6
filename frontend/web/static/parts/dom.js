// Building the page's elements. Text is only ever set as text: nothing that a model says becomes markup.

/**
 * An element. `props` are attributes; `onname` adds a listener, `true` an empty attribute, `false` and null nothing.
 * Children are nodes, texts, or lists of them.
 */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value !== false && value != null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

/** Make these an element's only children. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child != null && child !== false));
}

const styles = new Map();

/** A style sheet, once; resolves when it is there. */
export function loadStyle(href) {
  if (!styles.has(href)) {
    styles.set(
      href,
      new Promise((resolve, reject) => {
        const link = h("link", { rel: "stylesheet", href });
        link.addEventListener("load", resolve);
        link.addEventListener("error", () => reject(new Error(`${href} did not come`)));
        document.head.append(link);
      }),
    );
  }
  return styles.get(href);
}

/** Offer a text as a file. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Let the reader choose a file; its text, or null. */
export function choose(accept) {
  return new Promise((resolve) => {
    const input = h("input", { type: "file", accept });
    input.addEventListener("change", async () => resolve(input.files[0] ? await input.files[0].text() : null));
    input.addEventListener("cancel", () => resolve(null));
    input.click();
  });
}

/** A text of at most so many characters: of a longer one, the middle is left out. */
export function middle(text, most) {
  const head = Math.ceil((most - 1) / 2);
  return text.length <= most ? text : `${text.slice(0, head)}…${text.slice(head + 1 - most)}`;
}

/** An id on one line, shortened in the middle; the whole one is shown on hover, and is what a reader hears. */
export function shortId(id, most = 18) {
  return id.length <= most ? h("span", { class: "id" }, id) : h("span", { class: "id", title: id, "aria-label": id, role: "img" }, middle(id, most));
}

/** A number for people: 3 significant digits, thousands as k and M. */
export function short(value, unit = "") {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const [scale, suffix] = size >= 1e9 ? [1e9, "G"] : size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  return `${Number((value / scale).toPrecision(3))}${suffix}${unit && ` ${unit}`}`;
}

/** Seconds for people. */
export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return "–";
  if (seconds < 1e-3) return `${Number((seconds * 1e6).toPrecision(3))} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  return seconds < 120 ? `${Number(seconds.toPrecision(3))} s` : `${Math.round(seconds / 60)} min`;
}
