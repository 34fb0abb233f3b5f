/* When the page alerts: rules over runs and what they have been, without a view. Nothing is alerted that was so already when
   the page was opened or the rules were made. */

import { COMPARISON, readFilter } from "../runs/selection";
import { isTerminal, type Run, toNumber } from "../types";

export interface Rules {
  failed: boolean;
  ended: boolean; // completed or cancelled
  retried: boolean; // killed or failed, and started again
  nonFinite: boolean; // a metric is NaN or infinite
  stalledMin: number; // a running run without a new step for so long; 0: never
  metrics: string; // comparisons such as train/loss>5, apart by spaces
  only: string; // a filter of runs; empty: all
}

export const NO_RULES: Rules = { failed: false, ended: false, retried: false, nonFinite: false, stalledMin: 0, metrics: "", only: "" };

export const isAnyOn = (rules: Rules): boolean =>
  rules.failed || rules.ended || rules.retried || rules.nonFinite || rules.stalledMin > 0 || words(rules.metrics).length > 0;

const words = (text: string): string[] => text.split(/\s+/).filter((word) => word !== "");

/** Words that are no comparison of a metric with a number. */
export const findWrongWords = (metrics: string): string[] => words(metrics).filter((word) => !COMPARISON.test(word));

/** Rules as they were kept; what is missing or of another type is off. */
export function readRules(text: string | null): Rules {
  let kept: unknown = null;
  try {
    kept = JSON.parse(text ?? "null");
  } catch {
    // kept by something else
  }
  const given = typeof kept === "object" && kept !== null ? (kept as Record<string, unknown>) : {};
  const fits = Object.entries(NO_RULES).map(([name, off]) => [name, typeof given[name] === typeof off ? given[name] : off]);
  return Object.fromEntries(fits) as Rules;
}

export interface Alert {
  runId: string;
  text: string;
  isBad: boolean;
}

/** What was last seen of a run. */
interface Seen {
  run: Run;
  holds: ReadonlySet<string>; // conditions that hold
  step: number;
  stepMs: number; // when the page first saw that step
  isStalled: boolean;
}

const MINUTE = 60_000;

/** Compares runs with what they were before. One of these for one set of rules. */
export class Lookout {
  private seen = new Map<string, Seen>();
  private isPrimed = false;
  private readonly conditions: readonly [string, (run: Run) => boolean][];
  private readonly isWanted: (run: Run) => boolean;

  constructor(private readonly rules: Rules) {
    this.isWanted = readFilter(rules.only);
    const comparisons = words(rules.metrics).filter((word) => COMPARISON.test(word));
    this.conditions = [
      ...comparisons.map((word): [string, (run: Run) => boolean] => [`${word} holds`, readFilter(word)]),
      ...(rules.nonFinite ? [["a metric is NaN or infinite", hasNonFinite] as [string, (run: Run) => boolean]] : []),
    ];
  }

  /** Alerts since the last look. Runs that ended before it cost nothing. */
  look(runs: ReadonlyMap<string, Run>, nowMs: number): Alert[] {
    const alerts: Alert[] = [];
    const next = new Map<string, Seen>();
    for (const run of runs.values()) {
      const before = this.seen.get(run.run_id);
      if (before?.run === run && !this.canStall(run)) {
        next.set(run.run_id, before);
        continue;
      }
      const now = this.see(run, before, nowMs);
      next.set(run.run_id, now);
      // A run that is new to a page that has looked before was submitted since then: its first state is news.
      if ((before !== undefined || this.isPrimed) && this.isWanted(run)) alerts.push(...this.compare(before, now));
    }
    this.seen = next;
    this.isPrimed = true;
    return alerts;
  }

  private canStall(run: Run): boolean {
    return this.rules.stalledMin > 0 && run.state === "RUNNING";
  }

  private see(run: Run, before: Seen | undefined, nowMs: number): Seen {
    const isSameStep = before !== undefined && before.step === run.step && before.run.state === run.state && before.run.attempt === run.attempt;
    const stepMs = isSameStep ? before.stepMs : nowMs;
    const isStalled = this.canStall(run) && nowMs - stepMs >= this.rules.stalledMin * MINUTE;
    const holds = new Set(this.conditions.filter(([, test]) => test(run)).map(([text]) => text));
    return { run, holds, step: run.step, stepMs, isStalled };
  }

  private *compare(before: Seen | undefined, now: Seen): Generator<Alert> {
    const { run } = now;
    const alert = (text: string, isBad: boolean): Alert => ({ runId: run.run_id, text: `${run.run_id}: ${text}`, isBad });
    if (isTerminal(run) && (before === undefined || !isTerminal(before.run))) {
      const isFailed = run.state === "FAILED";
      const why = run.state === "COMPLETED" || run.reason === "" ? "" : `: ${run.reason}`;
      if (isFailed ? this.rules.failed : this.rules.ended) yield alert(`${run.state.toLowerCase()} at step ${run.step}${why}`, isFailed);
    }
    if (this.rules.retried && before !== undefined && before.run.attempt > 0 && run.attempt > before.run.attempt) {
      yield alert(`attempt ${run.attempt} was started`, true);
    }
    for (const condition of now.holds) if (before?.holds.has(condition) !== true) yield alert(`${condition} at step ${run.step}`, true);
    if (now.isStalled && before?.isStalled !== true) yield alert(`no new step for ${this.rules.stalledMin} min, since step ${run.step}`, true);
  }
}

const hasNonFinite = (run: Run): boolean => Object.values(run.metrics).some((value) => !Number.isFinite(toNumber(value)));
