/* Keyboard shortcuts: one listener, a table of what works on the current view, and the list that `?` shows. */

import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

export interface Shortcut {
  keys: string; // a key ("x", "?", "ArrowDown") or two one after the other ("g r")
  label: string;
  run: () => void;
}

export const shortcuts = signal<readonly Shortcut[]>([]);

const TWO_KEYS_MS = 1200;
let first = "";
let firstAt = 0;

/** Typing must not start anything. */
function isTyping(target: EventTarget | null): boolean {
  if (!(target instanceof HTMLElement)) return false;
  if (target.isContentEditable || target.tagName === "TEXTAREA" || target.tagName === "SELECT") return true;
  return target instanceof HTMLInputElement && !["checkbox", "radio", "button", "range"].includes(target.type);
}

/** Which shortcut a key completes, given the key before it. */
export function findShortcut(table: readonly Shortcut[], before: string, key: string): Shortcut | undefined {
  return (
    (before === "" ? undefined : table.find((one) => one.keys === `${before} ${key}`)) ??
    table.find((one) => one.keys === key)
  );
}

function handleKey(event: KeyboardEvent): void {
  if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || isTyping(event.target)) return;
  if (document.querySelector("dialog[open]") !== null) return;
  const before = Date.now() - firstAt < TWO_KEYS_MS ? first : "";
  const found = findShortcut(shortcuts.value, before, event.key);
  first = found === undefined ? event.key : "";
  firstAt = Date.now();
  if (found === undefined) return;
  event.preventDefault();
  found.run();
}

export function startShortcuts(): void {
  document.addEventListener("keydown", handleKey);
}

/** Shortcuts that work while a component is shown; the newest wins. Their keys and labels must not change. */
export function useShortcuts(table: readonly Shortcut[]): void {
  const newest = useRef(table);
  newest.current = table;
  useEffect(() => {
    const entries = table.map(({ keys, label }, index) => ({ keys, label, run: () => newest.current[index]?.run() }));
    shortcuts.value = [...entries, ...shortcuts.peek()];
    return () => {
      shortcuts.value = shortcuts.peek().filter((one) => !entries.includes(one));
    };
  }, []);
}
