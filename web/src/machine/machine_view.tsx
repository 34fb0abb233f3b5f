/* The machine: what it has, who holds it, who held it before, who waits for what; and its daemon. */

import "./machine.css";

import { useEffect, useState } from "preact/hooks";

import { api, type ApiError } from "../api";
import { machineNow } from "../clock";
import { formatAgo, formatBytes, formatDuration, formatExactTime, formatMemory, formatPlural, formatTime } from "../format";
import { query, runUrl, setQuery } from "../router";
import { asApiError, health, isDaemonDown, loaded, now, refreshHealth, runs } from "../store";
import type { Lane, Lanes, Machine, Queued } from "../types";
import { withCode } from "../ui/code";
import { Bar, Segmented } from "../ui/controls";
import { Icon } from "../ui/icon";
import { ErrorNotice, Loading } from "../ui/notice";
import { stateClass, stateWord } from "../ui/state";
import { placeBars, placeInTime, stateOf, timeTicks } from "./lanes";

const HOUR = 3_600_000;
const RANGES = [
  { value: "5m", label: "5 min", ms: HOUR / 12 },
  { value: "1h", label: "1 h", ms: HOUR },
  { value: "6h", label: "6 h", ms: 6 * HOUR },
  { value: "24h", label: "24 h", ms: 24 * HOUR },
  { value: "7d", label: "7 d", ms: 168 * HOUR },
] as const;
type Range = (typeof RANGES)[number]["value"];

const REFRESH_MS = 5000;
const NUM_NEWEST = 20;

/** The shortest time that shows the newest runs. */
function chooseRange(): Range {
  const submitted = [...runs.peek().values()].map((run) => run.submitted_ms).sort((left, right) => right - left);
  const oldest = submitted[Math.min(NUM_NEWEST, submitted.length) - 1] ?? 0;
  return RANGES.find((range) => range.ms > machineNow() - oldest)?.value ?? "24h";
}

/** What is read from the server, again every few seconds and when a run changes its state. */
function useMachine(spanMs: number) {
  const [machine, setMachine] = useState<Machine | null>(null);
  const [lanes, setLanes] = useState<Lanes | null>(null);
  const [error, setError] = useState<ApiError | null>(null);
  const states = [...runs.value.values()].filter((run) => run.ended_ms === null).map((run) => `${run.run_id} ${run.state}`).join();
  useEffect(() => {
    const abort = new AbortController();
    const read = async (): Promise<void> => {
      const to = machineNow();
      const [devices, found] = await Promise.allSettled([
        api.getDevices(abort.signal),
        api.getLanes(to - spanMs, to, abort.signal),
      ]);
      if (abort.signal.aborted) return;
      setMachine(devices.status === "fulfilled" ? devices.value : null);
      if (found.status === "fulfilled") setLanes(found.value);
      setError(found.status === "rejected" ? asApiError(found.reason) : null);
    };
    void read();
    const timer = setInterval(() => { if (!document.hidden) void read(); }, REFRESH_MS);
    return () => { abort.abort(); clearInterval(timer); };
  }, [spanMs, states]);
  return { machine, lanes, error };
}

export function MachineView() {
  const [usual, setUsual] = useState<Range | null>(null);
  useEffect(() => { if (usual === null && loaded.value !== "loading") setUsual(chooseRange()); }, [loaded.value]);
  const chosen = query.value.get("range") ?? usual ?? "6h";
  const range = RANGES.find((one) => one.value === chosen) ?? RANGES[2];
  const { machine, lanes, error } = useMachine(range.ms);
  useEffect(() => void refreshHealth(), []);
  return (
    <div class="stack machine">
      <div class="view-head">
        <h1>Machine</h1>
        <span class="grow" />
        <Segmented label="Time shown" options={RANGES} value={range.value as Range}
          onChange={(value) => setQuery({ range: value })} />
      </div>
      <Warnings />
      <Totals machine={machine} disk={lanes?.disk ?? null} />
      {lanes?.is_cut === true && <p class="muted">There are more attempts than can be shown: choose a shorter time.</p>}
      {error !== null && lanes === null ? <ErrorNotice error={error} />
        : lanes === null ? <Loading what="the lanes" />
        : <><LaneChart lanes={lanes.lanes} machine={machine} spanMs={range.ms} /><Queue queue={lanes.queue} /></>}
      <Daemon />
    </div>
  );
}

function Warnings() {
  const warnings = health.value?.warnings ?? [];
  if (warnings.length === 0) return null;
  return (
    <ul class="card warnings" aria-label="Warnings">
      {warnings.map((warning) => <li key={warning}><Icon name="warning" /><span>{withCode(warning)}</span></li>)}
    </ul>
  );
}

function Total({ label, text, value, max, isHigh = false }: { label: string; text: string; value: number; max: number; isHigh?: boolean }) {
  return (
    <div class="card total">
      <h2>{label}</h2>
      <p>{text}</p>
      <Bar value={value} max={max} label={label} kind={isHigh ? "is-failed" : ""} />
    </div>
  );
}

function Totals({ machine, disk }: { machine: Machine | null; disk: { total_bytes: number; free_bytes: number } | null }) {
  if (machine === null && disk === null) return null;
  const gpus = machine?.devices.filter((device) => device.kind !== "cpu") ?? [];
  const held = gpus.filter((device) => device.run_id !== "").length;
  return (
    <div class="totals">
      {gpus.length > 0 && <Total label="GPUs" text={`${held} of ${gpus.length} held`} value={held} max={gpus.length} />}
      {machine !== null && (
        <>
          <Total label="CPUs" text={`${machine.cpus_held} of ${machine.cpus} held by runs`} value={machine.cpus_held} max={machine.cpus} />
          <Total label="Memory" text={`${formatMemory(machine.memory_mb_held)} of ${formatMemory(machine.memory_mb)} held by runs`}
            value={machine.memory_mb_held} max={machine.memory_mb} />
        </>
      )}
      {disk !== null && (
        <Total label="Disk" text={`${formatBytes(disk.free_bytes)} of ${formatBytes(disk.total_bytes)} free`}
          value={disk.total_bytes - disk.free_bytes} max={disk.total_bytes} isHigh={disk.free_bytes < disk.total_bytes / 20} />
      )}
    </div>
  );
}

const ROW_PX = 26;

function LaneChart({ lanes, machine, spanMs }: { lanes: readonly Lane[]; machine: Machine | null; spanMs: number }) {
  const to = now.value;
  const from = to - spanMs;
  const isNarrow = innerWidth < 640;
  const edge = spanMs * (isNarrow ? 0.1 : 0.03); // labels are not cut off
  const ticks = timeTicks(from, to, isNarrow ? 4 : 9).filter((tick) => tick > from + edge && tick < to - edge);
  const at = (ms: number): string => `${(((ms - from) / spanMs) * 100).toFixed(3)}%`;
  return (
    <section class="card lanes" aria-label="Devices over time">
      <div class="lane axis" aria-hidden="true">
        <div class="lane-name" />
        <div class="track">{ticks.map((tick) => <span key={tick} style={{ left: at(tick) }}>{formatTime(tick, to)}</span>)}</div>
      </div>
      {lanes.map((lane) => {
        const { placed, numRows } = placeBars(lane.bars, to);
        const device = machine?.devices.find((one) => one.device_id === lane.lane);
        const about = device?.name ?? (machine === null ? "" : formatPlural(machine.cpus, "CPU"));
        const trouble = device?.quarantine_reason ?? "";
        return (
          <div class="lane" key={lane.lane}>
            <div class="lane-name">
              <strong>{lane.lane}</strong>
              <span class="muted ellipsis" title={about}>{about}</span>
            </div>
            <ul class="track" style={{ minHeight: `${numRows * ROW_PX + 6}px` }} aria-label={`Attempts on ${lane.lane}`}>
              {ticks.map((tick) => <li class="line" key={tick} aria-hidden="true" style={{ left: at(tick) }} />)}
              {placed.map((bar) => {
                const place = placeInTime(bar, from, to, to);
                if (place === null) return null;
                const state = stateOf(bar);
                const length = formatDuration((bar.to_ms ?? to) - bar.from_ms);
                const words = `${bar.run_id}, attempt ${bar.attempt}, ${stateWord(state).toLowerCase()}, ${length}`;
                return (
                  <li key={`${bar.run_id} ${bar.attempt}`}>
                    <a class={`attempt ${stateClass(state)}`} href={runUrl(bar.run_id)} aria-label={words}
                      title={`${words}\n${formatExactTime(bar.from_ms)}${bar.reason === "" ? "" : `\n${bar.reason}`}`}
                      style={{ left: `${place.left}%`, width: `${place.width}%`, top: `${bar.row * ROW_PX + 3}px` }}>
                      {place.width > (isNarrow ? 16 : 5) && bar.run_id}
                    </a>
                  </li>
                );
              })}
            </ul>
            {trouble !== "" && <p class="trouble"><Icon name="warning" size={13} /> Not used: {trouble}</p>}
          </div>
        );
      })}
      {lanes.length === 0 && <p class="muted body">No attempts in this time.</p>}
    </section>
  );
}

function Queue({ queue }: { queue: readonly Queued[] }) {
  return (
    <section class="card">
      <header><h2>Queue</h2><span class="tag">{queue.length}</span></header>
      {queue.length === 0 ? <p class="muted body">No run waits.</p> : (
        <div class="queue">
          <table class="table">
            <thead><tr><th scope="col">Run</th><th scope="col">Why it waits</th><th scope="col">Held by</th><th scope="col">Needs</th><th scope="col">Priority</th><th scope="col">Since</th></tr></thead>
            <tbody>
              {queue.map((one) => (
                <tr key={one.run_id}>
                  <td><a href={runUrl(one.run_id)}>{one.run_id}</a></td>
                  <td>{one.reason}{one.not_before_ms > now.value && `, ${formatAgo(one.not_before_ms, now.value)}`}</td>
                  <td>{one.holders.map((id, index) => <>{index > 0 && ", "}<a key={id} href={runUrl(id)}>{id}</a></>)}</td>
                  <td>{describeNeeds(one)}</td>
                  <td>{one.priority}</td>
                  <td title={formatExactTime(one.submitted_ms)}>{formatAgo(one.submitted_ms, now.value)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}

function describeNeeds({ needs }: Queued): string {
  return [
    ...needs.devices,
    ...(needs.gpus > 0 ? [formatPlural(needs.gpus, "GPU")] : []),
    ...(needs.cpus > 0 ? [formatPlural(needs.cpus, "CPU")] : []),
    ...(needs.memory_mb > 0 ? [formatMemory(needs.memory_mb)] : []),
  ].join(", ");
}

function Daemon() {
  const known = health.value;
  if (known === null) return null;
  const rows: [string, string][] = [
    ["Daemon", isDaemonDown.value ? (known.daemon === "silent" ? "runs, but does not answer" : "not running") : `running, version ${known.daemon_version ?? "?"}`],
    ["Launcher", known.launcher ?? ""],
    ["Watchers", known.num_watchers === undefined ? "" : String(known.num_watchers)],
    ["Gateway", `version ${known.gateway_version ?? "?"}${known.gateway_started_ms === undefined ? "" : `, started ${formatAgo(known.gateway_started_ms, now.value)}`}`],
    ["Home", known.home ?? ""],
  ];
  return (
    <section class="card">
      <header><h2>Daemon</h2></header>
      <dl class="daemon-facts body">
        {rows.filter(([, text]) => text !== "").map(([name, text]) => <div key={name}><dt>{name}</dt><dd>{text}</dd></div>)}
      </dl>
    </section>
  );
}
