/* Samples and videos: one slider over the steps, and all videos of a step played together. */

import { useRef } from "preact/hooks";

import { api, apiUrl, request } from "../api";
import { formatBytes, formatCount, formatPlural } from "../format";
import { query, setQuery } from "../router";
import { useShortcuts } from "../shortcuts";
import type { Artifact } from "../types";
import { Button } from "../ui/controls";
import { Icon } from "../ui/icon";
import { Empty, ErrorNotice, Loading } from "../ui/notice";
import { useAnswer } from "./answer";
import type { RunModel } from "./run_model";

const PAGE = 1000;
const FEW = 2; // they are shown larger
const MAX_TEXT = 65_536;

async function listMedia(runId: string, abort: AbortSignal): Promise<Artifact[]> {
  const found: Artifact[] = [];
  for (const kind of ["sample", "video"]) {
    let token = "";
    do {
      const page = await api.listArtifacts(runId, { kind, limit: PAGE, page_token: token || null }, abort);
      found.push(...page.artifacts.filter((one) => one.is_present));
      token = page.next_page_token;
    } while (token !== "");
  }
  return found;
}

/** Distinct steps, ascending. */
export function listSteps(media: readonly Artifact[]): number[] {
  return [...new Set(media.map(({ step }) => step))].sort((a, b) => a - b);
}

/** What a step shows, by name: each keeps its place from step to step. Videos first, so that they stand together. */
export function listShown(media: readonly Artifact[], step: number): Artifact[] {
  return media
    .filter((one) => one.step === step)
    .sort((a, b) => Number(isVideo(b)) - Number(isVideo(a)) || a.attempt - b.attempt || a.name.localeCompare(b.name, "en", { numeric: true }));
}

export function MediaTab({ model }: { model: RunModel }) {
  const answer = useAnswer((abort) => listMedia(model.runId, abort), `${model.runId} ${model.filesVersion.value}`);
  const before = useRef<Artifact[] | null>(null);
  if (answer.value !== null) before.current = answer.value;
  const media = before.current;
  const steps = media === null ? [] : listSteps(media);
  const wanted = query.value.get("step");
  const found = wanted === null ? steps.length - 1 : steps.findLastIndex((step) => step <= Number(wanted));
  const index = Math.max(found, 0);
  const step = steps[index];
  const move = (to: number): void => {
    const next = steps[Math.min(Math.max(to, 0), steps.length - 1)];
    if (next !== undefined) setQuery({ step: next === steps.at(-1) ? null : String(next) });
  };
  useShortcuts([
    { keys: "ArrowLeft", label: "Earlier samples", run: () => move(index - 1) },
    { keys: "ArrowRight", label: "Later samples", run: () => move(index + 1) },
  ]);
  if (answer.error !== null && media === null) return <ErrorNotice error={answer.error} retry={answer.reload} />;
  if (media === null) return <Loading what="samples" />;
  if (step === undefined) {
    return (
      <Empty title="No samples or videos">
        <p>They appear here as the run writes them: the <code>sample</code> hook, or an EpisodeRecorder for videos.</p>
      </Empty>
    );
  }
  const shown = listShown(media, step);
  return (
    <section class="media" aria-label="Samples and videos">
      <div class="media-tools">
        <Button icon="left" label="Earlier step" disabled={index === 0} onClick={() => move(index - 1)} />
        <input type="range" min={0} max={steps.length - 1} value={index} aria-label="Step" aria-valuetext={`step ${step}`}
          onInput={(event) => move(Number(event.currentTarget.value))} />
        <Button icon="right" label="Later step" disabled={index === steps.length - 1} onClick={() => move(index + 1)} />
        <output>step {formatCount(step)} <span class="muted">{index + 1} of {formatPlural(steps.length, "step")}</span></output>
      </div>
      <Players shown={shown} key={step} />
    </section>
  );
}

function Players({ shown }: { shown: readonly Artifact[] }) {
  const root = useRef<HTMLDivElement>(null);
  const numVideos = shown.filter(isVideo).length;
  const videos = (): HTMLVideoElement[] => [...(root.current?.querySelectorAll("video") ?? [])];
  /** All of them from one place, so that they stay together. */
  const play = (): void => {
    for (const video of videos()) {
      video.currentTime = 0;
      void video.play().catch(() => undefined);
    }
  };
  return (
    <>
      {numVideos > 1 && (
        <div class="row">
          <Button icon="play" onClick={play}>Play all {numVideos}</Button>
          <Button icon="pause" onClick={() => { for (const video of videos()) video.pause(); }}>Pause</Button>
        </div>
      )}
      <div class={`media-grid${shown.length <= FEW ? " few" : ""}`} ref={root}>{shown.map((one) => <Medium key={one.artifact_id} artifact={one} />)}</div>
    </>
  );
}

const isVideo = (artifact: Artifact): boolean => artifact.media_type.startsWith("video/");

function Medium({ artifact }: { artifact: Artifact }) {
  const url = apiUrl(["artifacts", artifact.artifact_id]);
  const type = artifact.media_type;
  return (
    <figure class="card medium">
      {isVideo(artifact) ? (
        <video src={url} controls loop muted playsInline preload="metadata" aria-label={artifact.name}
          {...(artifact.poster_id === "" ? {} : { poster: apiUrl(["artifacts", artifact.poster_id]) })} />
      ) : /^image\/(png|jpeg|gif|webp|avif|bmp)$/.test(type) ? (
        <a href={url} target="_blank" rel="noopener"><img src={url} alt={artifact.name} loading="lazy" /></a>
      ) : type.startsWith("audio/") ? (
        <audio src={url} controls preload="metadata" aria-label={artifact.name} />
      ) : type.startsWith("text/plain") || type === "application/json" ? (
        <TextMedium url={url} name={artifact.name} />
      ) : <p class="muted">This kind of file is not shown here.</p>}
      <figcaption>
        <span class="ellipsis grow" title={artifact.name}>{artifact.name}</span>
        <span class="muted">{artifact.attempt > 1 && `attempt ${artifact.attempt}, `}{formatBytes(artifact.size_bytes)}</span>
        <a href={apiUrl(["artifacts", artifact.artifact_id], { download: true })} download aria-label={`Download ${artifact.name}`}><Icon name="download" /></a>
      </figcaption>
    </figure>
  );
}

function TextMedium({ url, name }: { url: string; name: string }) {
  const text = useAnswer(async (abort) => {
    const response = await request(url, { signal: abort, headers: { Range: `bytes=0-${MAX_TEXT - 1}` } });
    return response.text();
  }, url);
  return <pre class="text" tabIndex={0} aria-label={name}>{text.error?.message ?? text.value ?? "Loading…"}</pre>;
}
