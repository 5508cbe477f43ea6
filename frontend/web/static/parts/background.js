// What the page does whichever room is open, so that a room can show what was before.
import { api, key } from "./api.js";
import { server } from "./server-state.js";

const FORBIDDEN = [401, 403, 404]; // this key may not, or another port answers that
const HIDDEN_MS = 10 * 60_000; // a page that nobody has looked at for longer asks for nothing
const STEPS_MS = 30_000, HOLD_SECONDS = 75; // browsers call timers of hidden pages only once a minute

let shownAt = Date.now();
const repeats = new Set();

const wake = () => {
  if (!document.hidden) shownAt = Date.now();
  for (const repeat of repeats) repeat();
};
document.addEventListener("visibilitychange", wake);
addEventListener("penstock-key", wake);
addEventListener("penstock-server", wake);

/** Call `act` every so many milliseconds while somebody may look at the page, until the server forbids it. */
export function regularly(act, milliseconds) {
  let timer = 0, last = 0, forbidden = null;
  async function repeat() {
    clearTimeout(timer);
    const now = Date.now(), isDue = now - last >= milliseconds * 0.9;
    const isLooked = !document.hidden || now - shownAt < HIDDEN_MS;
    if (isDue && isLooked && server.isReady && forbidden !== key.get()) {
      last = now;
      try {
        await act();
      } catch (error) {
        if (FORBIDDEN.includes(error.status)) forbidden = key.get();
      }
    }
    timer = setTimeout(repeat, Math.max(1000, last + milliseconds - Date.now()));
  }
  repeats.add(repeat);
  repeat();
}

/** The engine whose last seconds are kept: the one that the Scheduler room has shown last. */
export const watched = { engine: "" };

/** Have the server keep what the scheduler does, for the Scheduler room to begin with. Nothing of it is sent yet. */
export function holdSteps() {
  regularly(async () => {
    const engine = watched.engine && `&engine=${encodeURIComponent(watched.engine)}`;
    try {
      await api.text(`/debug/steps?seconds=0&hold=${HOLD_SECONDS}${engine}`);
    } catch (error) {
      if (!engine) throw error;
      watched.engine = ""; // it is gone
    }
  }, STEPS_MS);
}
