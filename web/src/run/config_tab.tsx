/* The job of a run, and what differs from its parent's. */

import { useState } from "preact/hooks";

import { api } from "../api";
import { formatPlural } from "../format";
import { runUrl } from "../router";
import { Button } from "../ui/controls";
import { Empty } from "../ui/notice";
import { toast } from "../ui/overlay";
import { useAnswer } from "./answer";
import { type Config, flatten, listNames } from "./fork_target";
import type { RunModel } from "./run_model";

const show = (value: unknown): string => (value === undefined ? "not set" : typeof value === "string" ? value : JSON.stringify(value));

/** Fields that every run has of its own. */
const OWN = new Set(["run_id", "name", "resume_checkpoint_path", "resume_from_latest", "resume_older"]);

export function ConfigTab({ model }: { model: RunModel }) {
  const run = model.run.value!;
  const parent = run.parent_run_id;
  const [search, setSearch] = useState("");
  const other = useAnswer(
    async (abort) => (parent === "" ? null : (await api.getRun(parent, abort)).run.config), parent,
  );
  const config = run.config;
  if (config === null) return <Empty title="The config of this run is not known" />;
  const before = other.value === null ? null : new Map(flatten(other.value as Config));
  const now = new Map(flatten(config));
  const names = listNames(now, before ?? new Map());
  const isChanged = (name: string): boolean =>
    before !== null && !OWN.has(name) && JSON.stringify(before.get(name)) !== JSON.stringify(now.get(name));
  const changed = names.filter(isChanged);
  const shown = [...changed, ...names.filter((name) => !isChanged(name) && now.has(name))]
    .filter((name) => `${name} ${show(now.get(name))}`.toLowerCase().includes(search.toLowerCase()));
  const copy = (): void => {
    navigator.clipboard.writeText(JSON.stringify(config, null, 2)).then(
      () => toast("Copied the config as JSON", "good"),
      () => toast("The browser did not allow copying", "bad"),
    );
  };
  return (
    <section class="stack" aria-label="Config">
      <div class="row">
        <input class="input search" type="search" placeholder="Find a field" aria-label="Find a field" value={search}
          onInput={(event) => setSearch(event.currentTarget.value)} />
        <Button icon="copy" onClick={copy}>Copy as JSON</Button>
        {before !== null && (
          <span class="muted">
            {changed.length === 0 ? "Same as " : `${formatPlural(changed.length, "field")} changed from `}<a href={runUrl(parent)}>{parent}</a>
          </span>
        )}
      </div>
      <div class="card scroll" tabIndex={0} role="group" aria-label="Fields of the config">
        <table class="table config">
          <thead><tr><th>Field</th><th>Value</th>{changed.length > 0 && <th>In {parent}</th>}</tr></thead>
          <tbody>
            {shown.map((name) => (
              <tr key={name} class={isChanged(name) ? "changed" : ""}>
                <th scope="row" class="mono">{name}</th>
                <td class="mono">{show(now.get(name))}</td>
                {changed.length > 0 && <td class="mono">{isChanged(name) ? show(before!.get(name)) : ""}</td>}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}
