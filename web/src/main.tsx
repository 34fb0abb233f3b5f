/* The page's start: theme, login, data, view. */

import "./theme.css";

import { render } from "preact";

import { areAlertsOn, startAlerts } from "./alerts/alerts";
import { followLogins, login, session, takeToken } from "./api";
import { App } from "./app";
import { startRouter } from "./router";
import { startShortcuts } from "./shortcuts";
import { startStore, stream } from "./store";
import { pauseWhileHidden } from "./stream";
import { startTheme } from "./theme";
import { toast } from "./ui/overlay";

async function start(): Promise<void> {
  startTheme();
  const token = takeToken();
  startRouter();
  startShortcuts();
  // A link that is pasted into this tab changes the fragment alone: the page has to take its token.
  window.addEventListener("hashchange", () => { if (new URLSearchParams(location.hash.slice(1)).has("token")) location.reload(); });
  if (token !== null) {
    try {
      await login(token);
    } catch (error) {
      toast(error instanceof Error ? error.message : String(error), "bad");
    }
  }
  startStore();
  startAlerts();
  pauseWhileHidden(stream, () => areAlertsOn.peek(), document, () => session.peek() === "open");
  stream.onFault = (message) => toast(message, "bad");
  session.subscribe((state) => stream.setPaused(state === "closed"));
  followLogins();
  const root = document.getElementById("app");
  if (root !== null) render(<App />, root);
}

void start();
