/* Alerts while a page is open, also in a hidden tab: a message in the page, and one of the browser where that is allowed. */

import { machineNow } from "../clock";
import { computed, effect, signal, untracked } from "@preact/signals";

import { keep, recall } from "../kept";
import { navigate, runUrl } from "../router";
import { loaded, runs } from "../store";
import { toast } from "../ui/overlay";
import { type Alert, isAnyOn, Lookout, NO_RULES, readRules, type Rules } from "./rules";

const KEY = "trn.alerts";
const LOOK_EVERY_MS = 5000; // for what happens by time alone

export const rules = signal<Rules>(NO_RULES);
export const areAlertsOn = computed(() => isAnyOn(rules.value));

/** What the browser says of messages outside of the page. */
export type Permission = NotificationPermission | "unsupported";
export const permission = signal<Permission>("unsupported");

export function setRules(next: Rules): void {
  keep(KEY, isAnyOn(next) ? JSON.stringify(next) : null);
  rules.value = next;
}

export async function askPermission(): Promise<void> {
  permission.value = await Notification.requestPermission();
}

function say({ runId, text, isBad }: Alert): void {
  toast(text, isBad ? "bad" : "info", runUrl(runId));
  if (permission.peek() !== "granted") return;
  try {
    const message = new Notification("trn", { body: text, tag: text });
    message.onclick = () => {
      window.focus();
      navigate(runUrl(runId));
      message.close();
    };
  } catch {
    // phones have no such messages from a page
  }
}

/** Called once. */
export function startAlerts(): void {
  rules.value = readRules(recall(KEY));
  if (typeof Notification !== "undefined") permission.value = Notification.permission;
  effect(() => {
    if (!areAlertsOn.value) return;
    const lookout = new Lookout(rules.value);
    const look = (): void => {
      if (loaded.peek() === "all") for (const alert of lookout.look(runs.peek(), machineNow())) say(alert);
    };
    const stop = effect(() => {
      loaded.value;
      runs.value;
      untracked(look);
    });
    const timer = setInterval(look, LOOK_EVERY_MS);
    return () => {
      stop();
      clearInterval(timer);
    };
  });
}
