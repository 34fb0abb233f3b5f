/* One run: what it is doing, its charts, its log, and everything that was kept of it. */

import "../chart/chart.css";
import "./run.css";

import { useEffect, useMemo, useRef } from "preact/hooks";

import { changeQuery, query } from "../router";
import { removed } from "../store";
import { Tabs } from "../ui/controls";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { ChartsTab } from "./charts_tab";
import { CodeTab } from "./code_tab";
import { ConfigTab } from "./config_tab";
import { DocumentsTab } from "./documents_tab";
import { FamilyTab } from "./family_tab";
import { FilesTab } from "./files_tab";
import { LogTab } from "./log_tab";
import { MediaTab } from "./media_tab";
import { RunHead } from "./run_head";
import { RunModel } from "./run_model";

const TABS: readonly { key: string; label: string; view: (props: { model: RunModel }) => preact.JSX.Element | null }[] = [
  { key: "charts", label: "Charts", view: ChartsTab },
  { key: "log", label: "Log", view: LogTab },
  { key: "media", label: "Samples and videos", view: MediaTab },
  { key: "config", label: "Config", view: ConfigTab },
  { key: "code", label: "Code", view: CodeTab },
  { key: "documents", label: "Environment and data", view: DocumentsTab },
  { key: "family", label: "Attempts and family", view: FamilyTab },
  { key: "files", label: "Files", view: FilesTab },
];

export function RunView({ runId }: { runId: string }) {
  const model = useMemo(() => new RunModel(runId), [runId]);
  useEffect(() => model.start(), [model]);
  if (removed.value.has(runId)) {
    return (
      <Empty title={`Run ${runId} was removed`} isPage>
        <p>Its files, log and metrics are deleted.</p>
        <a href="/">All runs</a>
      </Empty>
    );
  }
  if (model.run.value === null || model.details.value === null) {
    const error = model.error.value;
    return (
      <>
        <h1 class="visually-hidden">{runId}</h1>
        {error === null ? <Loading what={`run ${runId}`} />
          : error.status === 404 ? <Empty title={`There is no run ${runId}`}><p>It may have been removed.</p><a href="/">All runs</a></Empty>
          : <ErrorNotice error={error} retry={() => void model.read()} />}
      </>
    );
  }
  return <Loaded model={model} key={runId} />;
}

/** What is chosen in a tab stays in the address, but a text to find and a place in the log are of one tab alone. */
function tabUrl(key: string): string {
  const next = changeQuery(query.value, { tab: key === "charts" ? null : key, find: null, at: null }).toString();
  return location.pathname + (next === "" ? "" : `?${next}`);
}

function Loaded({ model }: { model: RunModel }) {
  const wanted = query.value.get("tab");
  const tab = TABS.find(({ key }) => key === wanted) ?? TABS[0]!;
  const View = tab.view;
  const root = useRef<HTMLDivElement>(null);
  useEffect(() => root.current?.querySelector(".tabs [aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }), [tab.key]);
  return (
    <div class="run-view" ref={root}>
      <RunHead model={model} run={model.run.value!} />
      <Tabs label={`Parts of ${model.runId}`} current={tab.key}
        tabs={TABS.map(({ key, label }) => ({ key, label, href: tabUrl(key) }))} />
      <View model={model} key={tab.key} />
    </div>
  );
}
