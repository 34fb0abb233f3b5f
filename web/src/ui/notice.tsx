/* What is shown where there is nothing, not yet anything, or an error. */

import type { ComponentChildren } from "preact";

import type { ApiError } from "../api";
import type { Fault } from "../types";
import { withCode } from "./code";
import { Button } from "./controls";
import { Icon } from "./icon";

/** `isPage`: there is nothing else in the page, so its title is the page's. */
export function Empty({ title, isPage = false, children }: { title: string; isPage?: boolean; children?: ComponentChildren }) {
  return (
    <div class="notice">
      {isPage ? <h1>{title}</h1> : <h2>{title}</h2>}
      {children}
    </div>
  );
}

export function Loading({ what }: { what: string }) {
  return <div class="notice" role="status">Loading {what}…</div>;
}

export function FaultList({ faults }: { faults: readonly Fault[] }) {
  return (
    <ul class="faults">
      {faults.map((fault, index) => (
        <li key={index}>
          {fault.path !== "" && <><code>{fault.path}</code>: </>}
          {withCode(fault.text)}
        </li>
      ))}
    </ul>
  );
}

export function ErrorNotice({ error, retry }: { error: ApiError; retry?: () => void }) {
  return (
    <div class="notice bad" role="alert">
      <Icon name="warning" size={28} />
      <h2>{withCode(error.message)}</h2>
      {error.faults.length > 0 && <FaultList faults={error.faults} />}
      {retry !== undefined && <Button onClick={retry}>Try again</Button>}
    </div>
  );
}

