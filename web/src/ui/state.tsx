/* The state of a run: an icon and a word; the colour says nothing that they do not. */

import { isTerminal, type Run } from "../types";
import type { IconName } from "./icon";
import { Icon } from "./icon";

const KNOWN: Record<string, { word: string; icon: IconName }> = {
  PENDING: { word: "Waiting", icon: "pending" },
  DISPATCHING: { word: "Starting", icon: "dispatching" },
  RUNNING: { word: "Running", icon: "running" },
  COMPLETED: { word: "Completed", icon: "completed" },
  FAILED: { word: "Failed", icon: "failed" },
  CANCELLED: { word: "Cancelled", icon: "cancelled" },
};

export const stateWord = (state: string): string => KNOWN[state]?.word ?? state;

export const stateClass = (state: string): string => `is-${state.toLowerCase()}`;

export function StateBadge({ run }: { run: Pick<Run, "state" | "is_cancel_wanted" | "ended_ms"> }) {
  const isCancelling = run.is_cancel_wanted && !isTerminal(run);
  return (
    <span class={`state ${stateClass(run.state)}`}>
      <Icon name={KNOWN[run.state]?.icon ?? "unknown"} size={13} />
      {isCancelling ? "Cancelling" : stateWord(run.state)}
    </span>
  );
}
