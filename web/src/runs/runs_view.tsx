/* All runs. */

import { loadError, loaded, loadRuns, runs } from "../store";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { StateBadge } from "../ui/state";
import { runUrl } from "../router";

export function RunsView() {
  if (loadError.value !== null && runs.value.size === 0) return <ErrorNotice error={loadError.value} retry={() => void loadRuns()} />;
  if (loaded.value === "loading") return <Loading what="runs" />;
  if (runs.value.size === 0) return <Empty title="No runs yet"><p>Start one with <code>trn run</code>.</p></Empty>;
  return (
    <ul class="stack">
      {[...runs.value.values()].map((run) => (
        <li key={run.run_id} class="row"><StateBadge run={run} /><a href={runUrl(run.run_id)}>{run.run_id}</a></li>
      ))}
    </ul>
  );
}
