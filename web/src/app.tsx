/* The frame of the page: header, banner, the view of the current route, help. */

import { signal } from "@preact/signals";
import { Component, type ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

import { ActionDialogs } from "./actions/actions";
import { areAlertsOn } from "./alerts/alerts";
import { AlertsDialog } from "./alerts/alerts_dialog";
import { ApiError, session } from "./api";
import { lazy } from "./lazy";
import { MachineView } from "./machine/machine_view";
import { matchRoute, navigate, path, type Route } from "./router";
import { RunsView } from "./runs/runs_view";
import { shortcuts, useShortcuts } from "./shortcuts";
import { announcement, health, isDaemonDown, isGatewayDown, stream } from "./store";
import { SubmitView } from "./submit/submit_view";
import { colourVersion, isDark, toggleTheme } from "./theme";
import { withCode } from "./ui/code";
import { Button } from "./ui/controls";
import { Icon } from "./ui/icon";
import { Empty, ErrorNotice } from "./ui/notice";
import { Dialog, Toasts } from "./ui/overlay";

// Charts are half of the page's code: they are loaded when a view first needs them.
const loadCharts = () => import("./chart_views");
const RunView = lazy(async () => (await loadCharts()).RunView);
const CompareView = lazy(async () => (await loadCharts()).CompareView);

const isHelpOpen = signal(false);
const areAlertsOpen = signal(false);

const LINKS = [
  { href: "/", label: "Runs", views: ["runs", "run", "compare"] },
  { href: "/machine", label: "Machine", views: ["machine"] },
  { href: "/submit", label: "Submit", views: ["submit"] },
] as const;

function Logo() {
  return (
    <svg width="24" height="24" viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="7" fill="var(--accent-fill)" />
      <path d="M6 9c3 11 8 14 20 14" fill="none" stroke="var(--on-accent)" stroke-width="3.2" stroke-linecap="round" />
      <circle cx="13.2" cy="19.2" r="3" fill="var(--on-accent)" />
    </svg>
  );
}

const CONNECTION = {
  live: { word: "Live", title: "New data is shown as it arrives.", kind: "is-live" },
  connecting: { word: "Connecting", title: "Connecting to the gateway.", kind: "" },
  lost: { word: "Reconnecting", title: "The connection to the gateway is lost. It is tried again.", kind: "is-lost" },
  paused: { word: "Paused", title: "This page was hidden. It connects again when it is shown.", kind: "" },
} as const;

function Connection() {
  const { word, title, kind } = CONNECTION[stream.connection.value];
  return (
    <span class={`live ${kind}`} title={title} role="img" aria-label={`Connection: ${word}`}><i /><span aria-hidden="true">{word}</span></span>
  );
}

function Header({ route }: { route: Route }) {
  void colourVersion.value;
  return (
    <header class="top">
      <a class="brand" href="/" aria-label="trn: all runs"><Logo /><span>trn</span></a>
      <nav aria-label="Views">
        {LINKS.map((link) => (
          <a key={link.href} href={link.href}
            aria-current={(link.views as readonly string[]).includes(route.view) ? "page" : undefined}>{link.label}</a>
        ))}
      </nav>
      <span class="grow" />
      <Connection />
      <Button kind="quiet" class={areAlertsOn.value ? "is-on" : ""} icon="bell" label={areAlertsOn.value ? "Alerts: on" : "Alerts"}
        onClick={() => { areAlertsOpen.value = true; }} />
      <Button kind="quiet" icon={isDark() ? "sun" : "moon"} label={isDark() ? "Light colours" : "Dark colours"} onClick={toggleTheme} />
      <Button kind="quiet" icon="help" label="Keyboard shortcuts" onClick={() => { isHelpOpen.value = true; }} />
    </header>
  );
}

function Banner() {
  if (isGatewayDown.value) {
    return (
      <div class="banner" role="alert">
        <Icon name="warning" />
        <span>Nothing answers at this address. Runs are not affected. Start the page again with <code>trn ui</code>.</span>
      </div>
    );
  }
  if (!isDaemonDown.value) return null;
  return (
    <div class="banner" role="status">
      <Icon name="warning" />
      <span>
        The daemon is not running. The page shows what is stored; runs that were started keep running.
        Start it with <code>trn daemon start</code>.
        {(health.value?.warnings ?? []).map((warning) => <span class="muted" key={warning}> {withCode(warning)}</span>)}
      </span>
    </div>
  );
}

function Help() {
  if (!isHelpOpen.value) return null;
  const close = (): void => { isHelpOpen.value = false; };
  return (
    <Dialog title="Keyboard shortcuts" onClose={close}>
      <table class="table">
        <tbody>
          {shortcuts.value.map((one) => (
            <tr key={one.keys}>
              <td>{one.keys.split(" ").map((key, index) => <>{index > 0 && " then "}<kbd key={key}>{keyName(key)}</kbd></>)}</td>
              <td>{one.label}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Dialog>
  );
}

const NAMES: Record<string, string> = { ArrowDown: "↓", ArrowUp: "↑", ArrowLeft: "←", ArrowRight: "→", " ": "Space" };
const keyName = (key: string): string => NAMES[key] ?? key;

function SignedOut() {
  return (
    <main id="main">
      <Empty title="Not signed in" isPage>
        <p>This page needs a link that only your own account on this machine can make. Links work once, for 5 minutes.</p>
        <p>Run <code>trn ui</code> in a terminal and open the link that it prints.</p>
      </Empty>
    </main>
  );
}

const TITLES: Record<Route["view"], string> = {
  runs: "Runs", run: "Run", compare: "Compare", machine: "Machine", submit: "Submit", missing: "Not found",
};

/** A fault in one view leaves the rest of the page alive. */
class Boundary extends Component<{ children: ComponentChildren }, { error: Error | null }> {
  override state: { error: Error | null } = { error: null };
  override componentDidCatch(error: unknown): void {
    console.error(error);
    this.setState({ error: error instanceof Error ? error : new Error(String(error)) });
  }
  override render() {
    const { error } = this.state;
    if (error === null) return this.props.children;
    const text = `This view cannot be shown. The page has a bug: ${error.message}`;
    return <ErrorNotice error={new ApiError(0, "internal", text)} retry={() => this.setState({ error: null })} />;
  }
}

function View({ route }: { route: Route }) {
  switch (route.view) {
    case "runs": return <RunsView />;
    case "run": return <RunView key={route.runId} runId={route.runId} />;
    case "compare": return <CompareView />;
    case "machine": return <MachineView />;
    case "submit": return <SubmitView />;
    case "missing":
      return <Empty title="There is no such page" isPage><p>The address <code>{path.value}</code> shows nothing.</p><a href="/">All runs</a></Empty>;
  }
}

export function App() {
  const route = matchRoute(path.value);
  const main = useRef<HTMLElement>(null);
  const isFirst = useRef(true);
  const subject = route.view === "run" ? route.runId : "";

  useShortcuts([
    { keys: "?", label: "Show this list", run: () => { isHelpOpen.value = true; } },
    { keys: "g r", label: "Go to runs", run: () => navigate("/") },
    { keys: "g m", label: "Go to machine", run: () => navigate("/machine") },
    { keys: "g s", label: "Go to submit", run: () => navigate("/submit") },
    { keys: "a", label: "Alerts", run: () => { areAlertsOpen.value = true; } },
    { keys: "t", label: "Switch between light and dark", run: toggleTheme },
  ]);

  useEffect(() => {
    document.title = `${subject === "" ? TITLES[route.view] : subject} · trn`;
    if (isFirst.current) isFirst.current = false;
    else main.current?.focus({ preventScroll: true }); // a new view: keyboard and screen reader start at its top
  }, [route.view, subject]);

  if (session.value === "closed") return <SignedOut />;
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => { event.preventDefault(); main.current?.focus(); }}>Skip to content</a>
      <Header route={route} />
      <Banner />
      <main id="main" ref={main} tabIndex={-1}><Boundary key={route.view + subject}><View route={route} /></Boundary></main>
      <Help />
      {areAlertsOpen.value && <AlertsDialog onClose={() => { areAlertsOpen.value = false; }} />}
      <ActionDialogs />
      <Toasts />
      <div class="visually-hidden" aria-live="polite">{announcement.value}</div>
    </>
  );
}
