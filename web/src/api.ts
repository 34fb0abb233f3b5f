/* Calls of the HTTP API. Every refusal is an ApiError with a message for people and the faults of a job. */

import { signal } from "@preact/signals";

import { noteTime } from "./clock";
import type {
  ArtifactPage, Fault, Freed, Health, JobCheck, Lanes, Machine, ManyMetrics, Marker, Run, RunDetails, RunMetrics, RunPage,
  SubmitResult,
} from "./types";

export const API = "/api/v1";

export class ApiError extends Error {
  constructor(
    readonly status: number, // 0: the gateway did not answer
    readonly code: string,
    message: string,
    readonly faults: Fault[] = [],
  ) {
    super(message);
  }
}

/** "open": requests are accepted. "closed": this browser has no session; only a new link from `trn ui` helps. */
export const session = signal<"open" | "closed">("open");

type Value = string | number | boolean | null | undefined;
export type Params = Record<string, Value | readonly Value[]>;

/** A query string: lists repeat their name, null and undefined are left out, true and false are 1 and 0. */
export function encodeParams(params: Params = {}): string {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const one of Array.isArray(value) ? (value as readonly Value[]) : [value as Value]) {
      if (one === null || one === undefined) continue;
      query.append(name, typeof one === "boolean" ? (one ? "1" : "0") : String(one));
    }
  }
  const text = query.toString();
  return text === "" ? "" : `?${text}`;
}

/** The address of an API resource; every part of the path is encoded. */
export function apiUrl(parts: readonly string[], params?: Params): string {
  return `${API}/${parts.map(encodeURIComponent).join("/")}${encodeParams(params)}`;
}

async function readError(response: Response): Promise<ApiError> {
  let code = "internal";
  let message = `The server answered ${response.status} ${response.statusText}.`;
  let faults: Fault[] = [];
  try {
    const { error } = (await response.json()) as { error?: { code?: string; message?: string; faults?: Fault[] } };
    code = error?.code ?? code;
    message = error?.message ?? message;
    faults = error?.faults ?? [];
  } catch {
    // not ours: what the status says is all that is known
  }
  return new ApiError(response.status, code, message, faults);
}

/** A response whose status is good. 401 closes the session. */
export async function request(url: string, init: RequestInit = {}): Promise<Response> {
  let response: Response;
  try {
    response = await fetch(url, { credentials: "same-origin", ...init });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new ApiError(0, "unavailable", "The gateway does not answer. `trn ui` starts it again.");
  }
  noteTime(response.headers.get("Date"));
  if (response.status === 401) session.value = "closed";
  if (!response.ok) throw await readError(response);
  return response;
}

export async function get<T>(parts: readonly string[], params?: Params, abort?: AbortSignal): Promise<T> {
  const init = abort === undefined ? {} : { signal: abort };
  return (await request(apiUrl(parts, params), init)).json() as Promise<T>;
}

export async function send<T>(
  method: "POST" | "PATCH" | "DELETE",
  parts: readonly string[],
  body: unknown = {},
  params?: Params,
  abort?: AbortSignal,
): Promise<T> {
  const response = await request(apiUrl(parts, params), {
    method,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    ...(abort === undefined ? {} : { signal: abort }),
  });
  return (response.status === 204 ? undefined : await response.json()) as T;
}

export const api = {
  listRuns: (params: Params = {}, abort?: AbortSignal) => get<RunPage>(["runs"], params, abort),
  getRun: (id: string, abort?: AbortSignal) => get<RunDetails>(["runs", id], {}, abort),
  getMetrics: (id: string, params: Params = {}, abort?: AbortSignal) =>
    get<RunMetrics>(["runs", id, "metrics"], params, abort),
  getManyMetrics: (params: Params, abort?: AbortSignal) => get<ManyMetrics>(["metrics"], params, abort),
  getMarkers: (id: string, abort?: AbortSignal) => get<{ markers: Marker[] }>(["runs", id, "markers"], {}, abort),
  listArtifacts: (id: string, params: Params = {}, abort?: AbortSignal) =>
    get<ArtifactPage>(["runs", id, "artifacts"], params, abort),
  getDevices: (abort?: AbortSignal) => get<Machine>(["devices"], {}, abort),
  getHealth: (abort?: AbortSignal) => get<Health>(["health"], {}, abort),
  getLanes: (fromMs: number, toMs: number, abort?: AbortSignal) =>
    get<Lanes>(["machine", "lanes"], { from_ms: fromMs, to_ms: toMs }, abort),
  getJobSchema: () => get<Record<string, unknown>>(["schemas", "job"]),

  checkJob: (body: Record<string, unknown>, abort?: AbortSignal) =>
    send<JobCheck>("POST", ["runs"], body, { dry_run: true }, abort),
  submit: (body: Record<string, unknown>) => send<SubmitResult>("POST", ["runs"], body),
  cancel: (id: string, reason = "") => send<Run>("POST", ["runs", id, "cancel"], { reason }),
  resume: (id: string, body: Record<string, unknown> = {}) => send<SubmitResult>("POST", ["runs", id, "resume"], body),
  again: (id: string, body: Record<string, unknown> = {}) => send<SubmitResult>("POST", ["runs", id, "again"], body),
  update: (id: string, change: { name?: string; notes?: string; tags?: Record<string, string | null> }) =>
    send<Run>("PATCH", ["runs", id], change),
  /** All of them or none. */
  remove: ([id = "", ...also]: readonly string[], isDryRun: boolean) =>
    send<{ freed: Freed[] }>("DELETE", ["runs", id], {}, { also, dry_run: isDryRun }),
};

/** Takes a single-use token out of the address, before anything can keep it. Null where there is none. */
export function takeToken(place: Location = location, past: History = history): string | null {
  const token = new URLSearchParams(place.hash.slice(1)).get("token");
  if (token !== null) past.replaceState(past.state, "", place.pathname + place.search);
  return token;
}

const otherTabs = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("trn-login");

/** A tab that lost its session has it again when another one of this browser has logged in. Called once. */
export function followLogins(): void {
  const look = async (): Promise<void> => {
    if (session.peek() === "open" || document.hidden) return;
    try {
      await api.getHealth();
      session.value = "open";
    } catch {
      // it is asked again when one comes back to this tab
    }
  };
  otherTabs?.addEventListener("message", () => void look());
  document.addEventListener("visibilitychange", () => void look());
  addEventListener("focus", () => void look());
}

/** Exchanges a token for the session's cookie. A refused token leaves a session that is already open as it is. */
export async function login(token: string): Promise<void> {
  try {
    await send("POST", ["login"], { token });
    session.value = "open";
    otherTabs?.postMessage("login");
  } catch (error) {
    // The next request finds out whether this browser had a session before: a link may be opened twice.
    session.value = "open";
    if (!(error instanceof ApiError) || error.status === 0) throw error;
  }
}
