/* Light or dark: as the system says, or as chosen on this page. */

import { effect, signal } from "@preact/signals";

import { keep, recall } from "./kept";

export type Theme = "system" | "light" | "dark";
const KEY = "trn.theme";

export const theme = signal<Theme>("system");

/** Changes whenever colours may have changed: what is drawn on a canvas reads it to be drawn again. */
export const colourVersion = signal(0);

const system = typeof matchMedia === "undefined" ? null : matchMedia("(prefers-color-scheme: dark)");

export const isDark = (): boolean =>
  theme.peek() === "dark" || (theme.peek() === "system" && (system?.matches ?? false));

/** The colour behind a token such as `--text`, as a canvas needs it. Ask again when `colourVersion` changes. */
export function readColour(token: `--${string}`): string {
  const probe = document.createElement("span");
  probe.style.color = `var(${token})`;
  probe.hidden = true;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

export function startTheme(): void {
  const kept = recall(KEY);
  if (kept === "light" || kept === "dark") theme.value = kept;
  effect(() => {
    const chosen = theme.value;
    if (chosen === "system") {
      delete document.documentElement.dataset["theme"];
      keep(KEY, null);
    } else {
      document.documentElement.dataset["theme"] = chosen;
      keep(KEY, chosen);
    }
    colourVersion.value = colourVersion.peek() + 1;
  });
  system?.addEventListener("change", () => {
    colourVersion.value += 1;
  });
}

/** From what is shown now to the other one. */
export function toggleTheme(): void {
  theme.value = isDark() ? "light" : "dark";
}
