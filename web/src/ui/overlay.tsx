/* Dialogs, menus and toasts. */

import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";

import { withCode } from "./code";
import { Button } from "./controls";
import type { IconName } from "./icon";
import { Icon } from "./icon";

interface DialogProps {
  title: string;
  onClose: () => void;
  children: ComponentChildren;
  footer?: ComponentChildren;
  isWide?: boolean;
  /** Enter in a field of one line, as in any form. */
  onEnter?: () => void;
}

/** A modal dialog: the browser keeps the focus inside, Esc closes it. */
export function Dialog({ title, onClose, children, footer, isWide = false, onEnter }: DialogProps) {
  const element = useRef<HTMLDialogElement>(null);
  const id = useId();
  useEffect(() => {
    const before = document.activeElement;
    element.current?.showModal();
    element.current?.querySelector<HTMLElement>(".body :is(input, textarea, select), footer button")?.focus();
    return () => {
      if (before instanceof HTMLElement && before.isConnected) before.focus();
    };
  }, []);
  return (
    <dialog ref={element} class={`dialog${isWide ? " wide" : ""}`} aria-labelledby={id}
      onKeyDown={(event) => {
        if (event.key !== "Enter" || event.isComposing || !(event.target instanceof HTMLInputElement && event.target.type === "text")) return;
        event.preventDefault();
        onEnter?.();
      }}
      onCancel={(event) => { event.preventDefault(); onClose(); }}
      onClick={(event) => { if (event.target === element.current) onClose(); }}>
      <header>
        <h2 id={id} class="grow">{title}</h2>
        <Button kind="quiet" icon="close" label="Close" onClick={onClose} />
      </header>
      <div class="body">{children}</div>
      {footer !== undefined && <footer>{footer}</footer>}
    </dialog>
  );
}

export interface MenuItem {
  label: string;
  icon?: IconName;
  isDanger?: boolean;
  isDisabled?: boolean;
  /** Why it is disabled. */
  title?: string;
  onSelect: () => void;
}

interface MenuProps {
  label: string; // of the button
  text?: string; // shown beside the icon
  icon?: IconName;
  items?: readonly MenuItem[];
  children?: ComponentChildren; // instead of items: checkboxes and the like
  isLeft?: boolean;
  isSmall?: boolean;
  kind?: "plain" | "quiet";
}

const EDGE = 8; // px kept free around a menu

/** Below its button, or above it where there is more room; never beyond the window. */
function placeItems(menu: HTMLElement, isLeft: boolean): void {
  const items = menu.querySelector<HTMLElement>(".items");
  const button = menu.querySelector("button")?.getBoundingClientRect();
  if (items === null || button === undefined) return;
  const { offsetWidth: width, offsetHeight: height } = items;
  const left = isLeft ? button.left : button.right - width;
  const fitsBelow = button.bottom + 4 + height <= innerHeight - EDGE || button.top < innerHeight / 2;
  items.style.left = `${Math.max(EDGE, Math.min(left, innerWidth - width - EDGE))}px`;
  items.style.top = `${fitsBelow ? button.bottom + 4 : Math.max(EDGE, button.top - 4 - height)}px`;
  items.style.maxHeight = fitsBelow ? `${innerHeight - button.bottom - 4 - EDGE}px` : "";
}

/** A button that opens a list. Arrow keys move, Esc and a click elsewhere close it. */
export function Menu({ label, text, icon = "more", items, children, isLeft = false, isSmall = false, kind = "quiet" }: MenuProps) {
  const [isOpen, setOpen] = useState(false);
  const root = useRef<HTMLDivElement>(null);

  const entries = (): HTMLElement[] =>
    [...(root.current?.querySelectorAll<HTMLElement>(".items button:not(:disabled), .items a, .items input") ?? [])];
  const close = (): void => {
    setOpen(false);
    root.current?.querySelector<HTMLElement>(":scope > button")?.focus();
  };

  useLayoutEffect(() => {
    if (!isOpen) return;
    if (root.current !== null) placeItems(root.current, isLeft);
    entries()[0]?.focus({ preventScroll: true });
    const leave = (event: Event): void => {
      if (!(event.target instanceof Node && root.current?.contains(event.target))) setOpen(false);
    };
    const events = ["pointerdown", "focusin", "scroll", "resize"];
    for (const name of events) addEventListener(name, leave, true);
    return () => { for (const name of events) removeEventListener(name, leave, true); };
  }, [isOpen]);

  const onKeyDown = (event: KeyboardEvent): void => {
    if (!isOpen) return;
    if (event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation();
      close();
      return;
    }
    const step = event.key === "ArrowDown" ? 1 : event.key === "ArrowUp" ? -1 : 0;
    if (step === 0) return;
    event.preventDefault();
    const all = entries();
    const at = all.indexOf(document.activeElement as HTMLElement);
    all[(at + step + all.length) % all.length]?.focus();
  };

  const isMenu = items !== undefined;
  return (
    <div class="menu" ref={root} onKeyDown={onKeyDown}>
      <Button kind={kind} isSmall={isSmall} icon={icon} {...(text === undefined ? { label } : {})}
        aria-haspopup={isMenu ? "menu" : "true"} aria-expanded={isOpen}
        onClick={(event: MouseEvent) => { event.stopPropagation(); setOpen(!isOpen); }}>
        {text}
      </Button>
      {isOpen && (
        <div class="items" {...(isMenu ? { role: "menu" } : { role: "group" })} aria-label={label}>
          {items?.map((item) => (
            <button type="button" role="menuitem" key={item.label} disabled={item.isDisabled ?? false} title={item.title}
              class={item.isDanger === true ? "danger" : ""}
              onClick={(event) => { event.stopPropagation(); close(); item.onSelect(); }}>
              {item.icon !== undefined && <Icon name={item.icon} />}
              {item.label}
            </button>
          ))}
          {children}
        </div>
      )}
    </div>
  );
}

interface Toast {
  id: number;
  text: string;
  kind: "info" | "good" | "bad";
  /** What it is about; empty: nothing to open. */
  href: string;
}

const toasts = signal<readonly Toast[]>([]);
let nextToast = 1;
const TOAST_MS = 6000;

/** A short message. One that says what went wrong stays until it is closed. */
export function toast(text: string, kind: Toast["kind"] = "info", href = ""): void {
  const id = nextToast++;
  toasts.value = [...toasts.value.slice(-3), { id, text, kind, href }];
  if (kind !== "bad") setTimeout(() => closeToast(id), TOAST_MS);
}

function closeToast(id: number): void {
  toasts.value = toasts.value.filter((one) => one.id !== id);
}

export function Toasts() {
  return (
    <div class="toasts" role="status" aria-live="polite">
      {toasts.value.map((one) => (
        <div class={`toast ${one.kind}`} key={one.id}>
          {one.href === "" ? <span class="grow">{withCode(one.text)}</span> : <a class="grow" href={one.href} onClick={() => closeToast(one.id)}>{one.text}</a>}
          <Button kind="quiet" isSmall icon="close" label="Close message" onClick={() => closeToast(one.id)} />
        </div>
      ))}
    </div>
  );
}
