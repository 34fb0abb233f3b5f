/* Which alerts there are. */

import { useState } from "preact/hooks";

import { Button, Field } from "../ui/controls";
import { Dialog } from "../ui/overlay";
import { askPermission, permission, rules, setRules } from "./alerts";
import { findWrongWords, type Rules } from "./rules";

const SWITCHES = [
  ["failed", "A run fails"],
  ["retried", "A run is started again after it was killed or failed"],
  ["ended", "A run completes or is cancelled"],
  ["nonFinite", "A metric is NaN or infinite"],
] as const;

const PERMISSIONS: Record<string, string> = {
  granted: "Alerts are also shown outside of the page.",
  denied: "The browser does not allow messages outside of the page. Its settings for this address change that.",
  unsupported: "This browser shows no messages outside of the page.",
};

export function AlertsDialog({ onClose }: { onClose: () => void }) {
  const [next, setNext] = useState<Rules>(rules.peek());
  const edit = (change: Partial<Rules>): void => setNext({ ...next, ...change });
  const wrong = findWrongWords(next.metrics);
  return (
    <Dialog title="Alerts" onClose={onClose}
      footer={
        <>
          <Button onClick={onClose}>Back</Button>
          <Button kind="primary" disabled={wrong.length > 0} onClick={() => { setRules(next); onClose(); }}>Save</Button>
        </>
      }>
      <p class="muted">They are shown while this page is open, also in a hidden tab, and are kept in this browser.</p>
      <div class="stack" role="group" aria-label="Alert when">
        {SWITCHES.map(([name, label]) => (
          <label class="check" key={name}>
            <input type="checkbox" checked={next[name]} onChange={(event) => edit({ [name]: event.currentTarget.checked })} /> {label}
          </label>
        ))}
      </div>
      <Field label="A metric passes a limit" hint="As in the filter of runs, several apart by spaces: train/loss>5 val/accuracy<0.1"
        faults={wrong.map((word) => `${word} is no comparison of a metric with a number`)}>
        {(attributes) => <input class="input mono" {...attributes} value={next.metrics} spellcheck={false} onInput={(event) => edit({ metrics: event.currentTarget.value })} />}
      </Field>
      <Field label="A running run has no new step for (minutes)" hint="0: no such alert.">
        {(attributes) => (
          <input class="input" type="number" min="0" {...attributes} value={next.stalledMin}
            onInput={(event) => edit({ stalledMin: Math.max(Number(event.currentTarget.value) || 0, 0) })} />
        )}
      </Field>
      <Field label="Only for runs that match" hint="A filter as in the table of runs. Empty: all runs.">
        {(attributes) => <input class="input" {...attributes} value={next.only} onInput={(event) => edit({ only: event.currentTarget.value })} />}
      </Field>
      {permission.value === "default"
        ? <p><Button onClick={() => void askPermission()}>Allow messages outside of the page</Button></p>
        : <p class="muted">{PERMISSIONS[permission.value]}</p>}
    </Dialog>
  );
}
