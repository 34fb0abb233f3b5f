/* The head of a run's page: state, why, progress, forecast, what can be done. */

import { listActions } from "../actions/actions";
import { formatAgo, formatCount, formatDuration, formatExactTime, formatNumber, formatTime } from "../format";
import { compareUrl, navigate, runUrl } from "../router";
import { ExactnessBadge, TagList } from "../runs/columns";
import { now } from "../store";
import { type Forecast, isTerminal, type Run, versionLabel } from "../types";
import { withCode } from "../ui/code";
import { Bar } from "../ui/controls";
import { Icon } from "../ui/icon";
import { Menu, type MenuItem } from "../ui/overlay";
import { StateBadge, stateClass } from "../ui/state";
import type { RunModel } from "./run_model";

export function RunHead({ model, run }: { model: RunModel; run: Run }) {
  const details = model.details.value!;
  const parent = run.parent_run_id;
  const compare: MenuItem = { label: "Compare with parent", icon: "compare", onSelect: () => navigate(compareUrl([parent, run.run_id])) };
  const [main, ...others] = sortActions([...(parent === "" ? [] : [compare]), ...listActions(run)], isTerminal(run));
  return (
    <header class="run-head">
      <div class="view-head">
        <h1 class="ellipsis" title={run.run_id}>{run.run_id}</h1>
        {run.name !== "" && run.name !== run.run_id && run.name !== run.family && <span class="muted ellipsis" title={run.name}>{run.name}</span>}
        <StateBadge run={run} />
        <ExactnessBadge run={{ ...run, exactness: details.exactness ?? run.exactness ?? null }} />
        <span class="head-actions">
          {main !== undefined && (
            <button type="button" class={`button${main.isDanger === true ? " danger" : ""}`} disabled={main.isDisabled ?? false} onClick={main.onSelect}>
              {main.icon !== undefined && <Icon name={main.icon} />}{main.label}
            </button>
          )}
          <Menu label="More actions" items={others} kind="plain" />
        </span>
      </div>
      <Why run={run} />
      <dl class="facts">
        {run.kind === "server" ? <ServedFacts model={model} run={run} /> : <div class="progress-fact">
          <dt>Progress</dt>
          <dd>
            {progressText(run)}
            <Bar value={run.step} max={run.end_step} label="Progress" kind={stateClass(run.state)} />
          </dd>
        </div>}
        <Fact name="Speed" value={speedText(model, run)} />
        <FinishFact run={run} forecast={details.forecast ?? null} />
        <Fact name="Started" value={startText(details.attempts[0]?.launched_ms ?? null)} title={exact(details.attempts[0]?.launched_ms)} />
        <Fact name={run.kind === "training" ? "Trained for" : "Ran for"} value={trainedText(model)} />
        {run.attempt > 1 && <Fact name="Attempts" value={formatCount(run.attempt)} />}
        {(run.trainer ?? "") !== "" && <Fact name="Trainer" value={run.trainer!} />}
        {run.devices.length > 0 && <Fact name="Devices" value={run.devices.join(", ")} />}
        {parent !== "" && <div><dt>Parent</dt><dd><a href={runUrl(parent)}>{parent}</a> at step {formatCount(run.start_step)}</dd></div>}
      </dl>
      {(Object.keys(run.tags).length > 0 || (run.notes ?? "") !== "") && (
        <div class="row"><TagList run={run} />{(run.notes ?? "") !== "" && <p class="notes">{run.notes}</p>}</div>
      )}
    </header>
  );
}

function progressText(run: Run): string {
  if (run.attempt === 0 && run.step === 0) return "not started";
  const end = run.end_step === null ? "" : ` of ${formatCount(run.end_step)}`;
  return run.kind === "prediction" ? `${formatCount(run.step)}${end} rows` : `step ${formatCount(run.step)}${end}`;
}

/** What a server answers with, and where. */
function ServedFacts({ model, run }: { model: RunModel; run: Run }) {
  const served = model.details.value?.served ?? null;
  const second = served === null ? "" : versionLabel(served.second);
  return (
    <>
      <Fact name="Answers with" value={run.serves || "nothing yet"} title={served?.live?.weights_hash} />
      {second !== "" && <Fact name={served!.second_is === "split" ? `${served!.percent} % of requests` : "Shadow"} value={second} />}
      <Fact name="Before" value={served === null ? "" : versionLabel(served.previous)} />
      {!isTerminal(run) && <Fact name="At" value={run.url} />}
    </>
  );
}

/** What most people do next stands first: cancel what runs, resume what has ended. */
function sortActions<T extends { label: string }>(items: readonly T[], hasEnded: boolean): T[] {
  const main = items.findIndex(({ label }) => (hasEnded ? /^(Resume|Run again)…/ : /^Cancel/).test(label));
  return main < 0 ? [...items] : [items[main]!, ...items.filter((_, i) => i !== main)];
}

function Why({ run }: { run: Run }) {
  const text = run.state === "COMPLETED" ? run.stop_reason : run.state === "RUNNING" && !run.is_cancel_wanted ? "" : run.reason;
  if (text === "") return null;
  return <p class={`why ${stateClass(run.state)}`}>{withCode(text)}</p>;
}

function Fact({ name, value, title }: { name: string; value: string; title?: string | undefined }) {
  if (value === "") return null;
  return <div><dt>{name}</dt><dd title={title}>{value}</dd></div>;
}

const exact = (ms: number | null | undefined): string | undefined => (ms ? formatExactTime(ms) : undefined);

const startText = (ms: number | null): string => (ms === null ? "" : formatAgo(ms, now.value));

function speedText(model: RunModel, run: Run): string {
  const speed = model.speed.value;
  if (isTerminal(run) || speed === null || run.kind === "server") return "";
  return speed >= 1 || speed === 0 ? `${formatNumber(speed, 3)} steps/s` : `${formatNumber(1 / speed, 3)} s/step`;
}

function trainedText(model: RunModel): string {
  let ms = 0;
  for (const { launched_ms, ended_ms } of model.details.value?.attempts ?? []) ms += Math.max((ended_ms ?? now.value) - launched_ms, 0);
  return ms === 0 ? "" : formatDuration(ms);
}

/** When it will end, with the band in which that is likely. */
function FinishFact({ run, forecast }: { run: Run; forecast: Forecast | null }) {
  if (run.ended_ms !== null) return <Fact name="Ended" value={formatAgo(run.ended_ms, now.value)} title={exact(run.ended_ms)} />;
  if (forecast === null) return null;
  const left = Math.max(forecast.finish_ms - now.value, 0);
  const low = Math.max(forecast.low_ms - now.value, 0);
  const high = Math.max(forecast.high_ms - now.value, 0);
  return (
    <div title={forecast.basis}>
      <dt>Finishes</dt>
      <dd>{formatTime(forecast.finish_ms)}, in {formatDuration(left)}
        {formatDuration(low) !== formatDuration(high) && <span class="muted"> ({formatDuration(low)} to {formatDuration(high)})</span>}</dd>
    </div>
  );
}
