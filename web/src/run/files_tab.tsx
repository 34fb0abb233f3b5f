/* Files of a run: what they are, how large, their hashes. */

import { useEffect, useState } from "preact/hooks";

import { api, apiUrl } from "../api";
import { formatBytes, formatCount, formatExactTime, formatPlural, formatTime } from "../format";
import { query, setQuery } from "../router";
import { asApiError } from "../store";
import type { Artifact } from "../types";
import { Button, Segmented } from "../ui/controls";
import { Icon } from "../ui/icon";
import { Empty, Loading } from "../ui/notice";
import { toast } from "../ui/overlay";
import type { RunModel } from "./run_model";

const KINDS = ["", "checkpoint", "sample", "video", "file"];
const PAGE = 200;

export function FilesTab({ model }: { model: RunModel }) {
  const kind = query.value.get("kind") ?? "";
  const [files, setFiles] = useState<readonly Artifact[] | null>(null);
  const [token, setToken] = useState("");
  const read = async (from: string, before: readonly Artifact[]): Promise<void> => {
    try {
      const page = await api.listArtifacts(model.runId, { kind: kind || null, limit: PAGE, page_token: from || null });
      setFiles([...before, ...page.artifacts]);
      setToken(page.next_page_token);
    } catch (reason) {
      toast(asApiError(reason).message, "bad");
    }
  };
  useEffect(() => void read("", []), [model.runId, kind, model.filesVersion.value]);
  return (
    <section class="stack" aria-label="Files">
      <div class="row">
        <Segmented label="Kind of file" value={kind} options={KINDS.map((value) => ({ value, label: value === "" ? "all" : `${value}s` }))}
          onChange={(value) => setQuery({ kind: value })} />
        <span class="muted grow">In <span class="mono">{model.details.value!.folder}</span></span>
      </div>
      {files === null ? <Loading what="files" /> : files.length === 0 ? <Empty title="No files yet" /> : (
        <div class="card scroll" tabIndex={0} role="group" aria-label="Table of files">
          <table class="table">
            <thead><tr><th class="number">Step</th><th>Name</th><th>Kind</th><th class="number">Size</th><th>SHA-256</th><th>Written</th><th><span class="visually-hidden">Download</span></th></tr></thead>
            <tbody>
              {files.map((file) => (
                <tr key={file.artifact_id} class={file.is_present ? "" : "gone"}>
                  <td class="number">{formatCount(file.step)}</td>
                  <td class="mono">{file.name}{file.attempt > 1 && <span class="muted"> attempt {file.attempt}</span>}
                    {file.reason !== "" && <p class="fault">{file.reason}</p>}</td>
                  <td>{file.kind}</td>
                  <td class="number">{formatBytes(file.size_bytes)}</td>
                  <td class="mono muted" title={file.sha256}>{file.sha256.slice(0, 12)}</td>
                  <td title={formatExactTime(file.created_ms)}>{formatTime(file.created_ms)}</td>
                  <td>
                    {file.is_present
                      ? <a href={apiUrl(["artifacts", file.artifact_id], { download: true })} download aria-label={`Download ${file.name}`}><Icon name="download" /></a>
                      : <span class="muted" title={file.reason}>{file.state}</span>}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {files !== null && token !== "" && <Button onClick={() => void read(token, files)}>Show more than {formatPlural(files.length, "file")}</Button>}
    </section>
  );
}
