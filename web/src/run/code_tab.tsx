/* The code that a run trains with: its files, and what differs from the parent's or another run's. */

import { get } from "../api";
import { formatBytes, formatPlural } from "../format";
import { query, runUrl, setQuery } from "../router";
import { Segmented } from "../ui/controls";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { useAnswer } from "./answer";
import type { RunModel } from "./run_model";

interface CodeFile {
  path: string;
  sha256: string;
  size_bytes: number;
}

export interface FileDiff {
  path: string;
  status: string;
  diff: string;
}

export function CodeTab({ model }: { model: RunModel }) {
  const parent = model.run.value!.parent_run_id;
  const kind = query.value.get("code") ?? (parent === "" ? "files" : "diff");
  return (
    <section class="stack" aria-label="Code">
      {parent !== "" && (
        <Segmented label="Code" value={kind} onChange={(value) => setQuery({ code: value })}
          options={[{ value: "diff", label: "Changes from parent" }, { value: "files", label: "All files" }]} />
      )}
      {kind === "diff" && parent !== "" ? <Changes runId={model.runId} against={parent} /> : <Files runId={model.runId} />}
    </section>
  );
}

function Files({ runId }: { runId: string }) {
  const answer = useAnswer((abort) => get<{ files: CodeFile[] }>(["runs", runId, "code"], {}, abort), runId);
  if (answer.error !== null) return <ErrorNotice error={answer.error} retry={answer.reload} />;
  if (answer.value === null) return <Loading what="code" />;
  const { files } = answer.value;
  if (files.length === 0) return <Empty title="No code was kept with this run"><p>A snapshot is taken when <code>trn run</code> submits from a folder.</p></Empty>;
  return (
    <div class="card scroll" tabIndex={0} role="group" aria-label="Table of code">
      <table class="table">
        <thead><tr><th>File</th><th class="number">Size</th><th>SHA-256</th></tr></thead>
        <tbody>
          {files.map((file) => (
            <tr key={file.path}>
              <td class="mono">{file.path}</td>
              <td class="number">{formatBytes(file.size_bytes)}</td>
              <td class="mono muted" title={file.sha256}>{file.sha256.slice(0, 12)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Changes({ runId, against }: { runId: string; against: string }) {
  const answer = useAnswer((abort) => get<{ files: FileDiff[] }>(["runs", runId, "code", "diff"], { against }, abort), `${runId} ${against}`);
  if (answer.error !== null) return <ErrorNotice error={answer.error} retry={answer.reload} />;
  if (answer.value === null) return <Loading what="changes" />;
  const { files } = answer.value;
  if (files.length === 0) return <Empty title="The code is the same"><p>It is that of <a href={runUrl(against)}>{against}</a>.</p></Empty>;
  return (
    <>
      <p class="muted">{formatPlural(files.length, "file")} changed from <a href={runUrl(against)}>{against}</a></p>
      {files.map((file) => <Diff key={file.path} file={file} />)}
    </>
  );
}

const lineClass = (line: string): string =>
  line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : line.startsWith("@@") ? "place" : "";

export function Diff({ file }: { file: FileDiff }) {
  const lines = file.diff.split("\n").filter((line) => !/^(---|\+\+\+) /.test(line));
  return (
    <details class="card diff" open={lines.length < 400}>
      <summary><span class="mono">{file.path}</span> <span class="muted">{file.status}</span></summary>
      <pre tabIndex={0} aria-label={`Changes of ${file.path}`}>
        {lines.map((line, i) => <span key={i} class={lineClass(line)}>{line}{"\n"}</span>)}
      </pre>
    </details>
  );
}
