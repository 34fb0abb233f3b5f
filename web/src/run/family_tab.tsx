/* Attempts of a run, and the tree of the runs that it continues or that continue it. */

import { formatCount, formatDuration, formatExactTime, formatTime } from "../format";
import { compareUrl, runUrl } from "../router";
import { now, runs } from "../store";
import { type Attempt, type Promotion, type Run, versionLabel } from "../types";
import { Icon } from "../ui/icon";
import { StateBadge } from "../ui/state";
import type { RunModel } from "./run_model";

export function FamilyTab({ model }: { model: RunModel }) {
  const details = model.details.value!;
  return (
    <section class="stack" aria-label="Attempts and family">
      <Promotions promotions={details.promotions} />
      <Attempts attempts={details.attempts} />
      <Family model={model} />
    </section>
  );
}

/** What a served name answered with, and who changed it. */
function Promotions({ promotions }: { promotions: readonly Promotion[] }) {
  if (promotions.length === 0) return null;
  return (
    <div class="card scroll" tabIndex={0} role="group" aria-label="Promotions">
      <header><h2>Promotions</h2></header>
      <table class="table">
        <thead><tr><th class="number">#</th><th>Asked</th><th>What</th><th>Model</th><th>Before</th><th>By</th><th>Result</th></tr></thead>
        <tbody>
          {promotions.map((one) => (
            <tr key={one.number}>
              <td class="number">{one.number}</td>
              <td title={formatExactTime(one.asked_ms)}>{formatTime(one.asked_ms)}</td>
              <td>{one.action}{one.action === "split" && `, ${one.percent} %`}</td>
              <td>{versionLabel(one.version)}</td>
              <td>{versionLabel(one.previous)}</td>
              <td>{one.by}</td>
              <td class="why-cell">{one.state === "refused" ? `refused: ${one.words}` : one.state}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Attempts({ attempts }: { attempts: readonly Attempt[] }) {
  if (attempts.length === 0) return <p class="muted">No attempt has started yet.</p>;
  return (
    <div class="card scroll" tabIndex={0} role="group" aria-label="Attempts">
      <header><h2>Attempts</h2></header>
      <table class="table">
        <thead>
          <tr><th class="number">#</th><th>Started</th><th>Ran for</th><th class="number">Last step</th><th>How it ended</th><th>Devices</th><th class="number">Process</th></tr>
        </thead>
        <tbody>
          {attempts.map((one) => (
            <tr key={one.number}>
              <td class="number">{one.number}</td>
              <td title={formatExactTime(one.launched_ms)}>{formatTime(one.launched_ms)}</td>
              <td>{formatDuration((one.ended_ms ?? now.value) - one.launched_ms)}</td>
              <td class="number">{formatCount(one.step)}</td>
              <td class="why-cell">{one.ended_ms === null ? "running" : one.reason || (one.exit_code === 0 ? "completed" : "ended")}</td>
              <td>{one.devices.join(", ") || "CPU"}</td>
              <td class="number muted">{one.pid || ""}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

interface Node {
  runId: string;
  children: Node[];
}

/** The tree from its root, of the runs that the page knows. A cycle cannot be: each run is put in once. */
export function buildTree(rootId: string, all: ReadonlyMap<string, Pick<Run, "run_id" | "parent_run_id" | "submitted_ms">>): Node {
  const children = new Map<string, string[]>();
  for (const run of [...all.values()].sort((a, b) => a.submitted_ms - b.submitted_ms)) {
    if (run.parent_run_id !== "") children.set(run.parent_run_id, [...(children.get(run.parent_run_id) ?? []), run.run_id]);
  }
  const seen = new Set<string>();
  const make = (runId: string): Node => {
    seen.add(runId);
    return { runId, children: (children.get(runId) ?? []).filter((child) => !seen.has(child)).map(make) };
  };
  return make(rootId);
}

const countNodes = (node: Node): number => node.children.reduce((sum, child) => sum + countNodes(child), 1);

function Family({ model }: { model: RunModel }) {
  const details = model.details.value!;
  const tree = buildTree(details.parents[0] ?? model.runId, runs.value);
  const others = details.family.filter((id) => id !== model.runId);
  const line = [...details.parents, model.runId];
  return (
    <div class="card">
      <header>
        <h2 class="grow">Parents and children</h2>
        {line.length > 1 && <a class="button small" href={compareUrl(line)}><Icon name="compare" />Compare the line</a>}
      </header>
      <div class="body">
        {countNodes(tree) === 1 && others.length === 0
          ? <p class="muted">No run continues this one, and it continues none.</p>
          : <ul class="family"><Branch node={tree} current={model.runId} /></ul>}
        {others.length > 0 && (
          <p class="muted">Runs of family {model.run.value!.family}:{" "}
            {details.family.map((id, i) => <span key={id}>{i > 0 && ", "}{id === model.runId ? <b>{id}</b> : <a href={runUrl(id)}>{id}</a>}</span>)}</p>
        )}
      </div>
    </div>
  );
}

function Branch({ node, current }: { node: Node; current: string }) {
  const run = runs.value.get(node.runId);
  return (
    <li>
      <span class="row">
        {node.runId === current ? <b aria-current="true">{node.runId}</b> : <a href={runUrl(node.runId)}>{node.runId}</a>}
        {run !== undefined && <StateBadge run={run} />}
        {run !== undefined && run.parent_run_id !== "" && <span class="muted">from step {formatCount(run.start_step)}</span>}
        {run !== undefined && <span class="muted">at step {formatCount(run.step)}</span>}
      </span>
      {node.children.length > 0 && <ul>{node.children.map((child) => <Branch key={child.runId} node={child} current={current} />)}</ul>}
    </li>
  );
}
