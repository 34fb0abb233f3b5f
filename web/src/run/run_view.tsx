/* One run. */

import { Empty } from "../ui/notice";

export function RunView({ runId }: { runId: string }) {
  return <Empty title={runId} />;
}
