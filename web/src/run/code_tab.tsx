/* The code that a run trains with: its files, and what differs from the parent's or another run's. */

import { apiUrl, get, request } from "../api";
import { formatBytes, formatPlural } from "../format";
import { changeQuery, query, runUrl, setQuery } from "../router";
import { Button, Segmented } from "../ui/controls";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { useAnswer } from "./answer";
import type { RunModel } from "./run_model";

const MAX_SHOWN_BYTES = 2 << 20; // the gateway sends no more of a file

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
  const open = files.find(({ path }) => path === query.value.get("file"));
  return (
    <>
      {open !== undefined && <Source key={open.sha256} runId={runId} file={open} />}
      <div class="card scroll" tabIndex={0} role="group" aria-label="Table of code">
        <table class="table">
          <thead><tr><th>File</th><th class="number">Size</th><th>SHA-256</th></tr></thead>
          <tbody>
            {files.map((file) => (
              <tr key={file.path}>
                <td class="mono"><a href={fileUrl(file.path)} aria-current={file === open ? "true" : undefined}>{file.path}</a></td>
                <td class="number">{formatBytes(file.size_bytes)}</td>
                <td class="mono muted" title={file.sha256}>{file.sha256.slice(0, 12)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  );
}

const fileUrl = (path: string): string => `${location.pathname}?${changeQuery(query.value, { file: path }).toString()}`;

/** The text of one file, as it was when the run was submitted. */
function Source({ runId, file }: { runId: string; file: CodeFile }) {
  const text = useAnswer(async (abort) => (await request(apiUrl(["runs", runId, "code", "files", file.sha256]), { signal: abort })).text(), file.sha256);
  return (
    <section class="card source" aria-label={file.path}>
      <header>
        <h2 class="grow mono ellipsis">{file.path}</h2>
        <Button kind="quiet" icon="close" label={`Close ${file.path}`} onClick={() => setQuery({ file: null })} />
      </header>
      {text.error !== null ? <ErrorNotice error={text.error} retry={text.reload} />
        : text.value === null ? <Loading what="the file" />
        : <pre tabIndex={0} aria-label={`Text of ${file.path}`}>{text.value}</pre>}
      {file.size_bytes > MAX_SHOWN_BYTES && <p class="muted nothing">The first {formatBytes(MAX_SHOWN_BYTES)} of {formatBytes(file.size_bytes)}.</p>}
    </section>
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
