/* The charts of a run, and forking from a point of a curve. */

import { effect } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";

import { Charts, useBoard } from "../chart/board";
import { asApiError } from "../store";
import { isTerminal } from "../types";
import { toast } from "../ui/overlay";
import { ForkBar, ForkDialog } from "./fork_dialog";
import type { ForkTarget } from "./fork_target";
import type { RunModel } from "./run_model";

export function ChartsTab({ model }: { model: RunModel }) {
  const board = useBoard(() => model.makeFeed((error) => toast(asApiError(error).message, "bad")), model.runId);
  const [target, setTarget] = useState<ForkTarget | null>(null);
  const run = model.run.value!;
  const canFork = run.kind === "training";
  board.renderPick = canFork ? (step) => <ForkBar model={model} withParents={board.state.value.withParents} step={step} onFork={setTarget} onClose={() => board.clear()} /> : null;
  if (run.kind === "server") board.stepLabel = "seconds";
  else if (run.kind === "prediction") board.stepLabel = "rows";
  useEffect(
    () => model.clock.subscribe((clock) => { board.runs.value = [{ runId: model.runId, label: model.runId, index: 0, clock }]; }),
    [model, board],
  );
  const withParents = board.state.value.withParents;
  useEffect(
    () => effect(() => { board.marks.value = withParents ? [...model.ancestorMarks.value, ...model.marks.value] : model.marks.value; }),
    [model, board, withParents],
  );
  useEffect(() => {
    if (model.withParents === withParents) return;
    model.withParents = withParents;
    board.feed.refetch();
  }, [withParents]);
  const hasParents = (model.details.value?.parents.length ?? 0) > 0;
  return (
    <>
      <Charts board={board} names={model.names.value} hasEnded={isTerminal(run)}>
        {hasParents && (
          <label class="check"><input type="checkbox" checked={withParents}
            onChange={(event) => board.update({ withParents: event.currentTarget.checked, zoom: null, kind: "step", xMetric: "" })} /> with parents</label>
        )}
      </Charts>
      {model.names.value.length > 0 && <MarkLegend kinds={new Set(board.marks.value.map(({ kind }) => kind))} canFork={canFork} />}
      {target !== null && <ForkDialog model={model} target={target} onClose={() => setTarget(null)} />}
    </>
  );
}

const KINDS: readonly [string, string, string][] = [
  ["checkpoint", "◆", "checkpoint"],
  ["removed", "◇", "checkpoint, removed since"],
  ["best", "◆", "best"],
  ["attempt", "▶", "attempt"],
  ["resume", "▶", "resumed"],
  ["kill", "✕", "killed or failed, then retried"],
  ["failure", "✕", "failed"],
  ["validation", "•", "validation"],
  ["promotion", "▲", "another model"],
];

function MarkLegend({ kinds, canFork }: { kinds: ReadonlySet<string>; canFork: boolean }) {
  const shown = KINDS.filter(([kind]) => kinds.has(kind));
  return (
    <p class="mark-legend muted">
      {shown.map(([kind, sign, label]) => <span key={kind}><i class={`sign is-${kind}`} aria-hidden="true">{sign}</i> {label}</span>)}
      <span class="only-mouse">{canFork && "Click a point to fork from it. "}Drag to zoom, double-click to reset.</span>
      <span class="only-touch">{canFork && "Tap a point to fork from it. "}Zoom with two fingers.</span>
      <span class="keys">Keys in a chart: <kbd>←</kbd> <kbd>→</kbd> cursor, <kbd>+</kbd> <kbd>−</kbd> zoom, <kbd>0</kbd> reset
        {canFork && <>, <kbd>Enter</kbd> pick</>}</span>
    </p>
  );
}

